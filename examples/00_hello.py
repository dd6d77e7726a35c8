"""Generate text with the built-in checkpoint: `python examples/00_hello.py`.

Its weights are random, so the text is noise. Give `LLM` the directory of a checkpoint for another.
"""

from runtime import LLM, SamplingParams

llm = LLM()
(output,) = llm.generate("The quick brown fox", SamplingParams(temperature=0, max_tokens=16))
print(output.text)
