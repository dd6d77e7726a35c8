"""Several prompts in one call, each with its own parameters: `python examples/01_batch.py`.

They run together, yet each gets the tokens that it would get alone.
"""

from runtime import LLM, SamplingParams

prompts = [
    "Once upon a time",
    [0, 17, 42, 5],  # token ids are used as they are
    "Once upon a time",
]
params = [
    SamplingParams(temperature=0, max_tokens=12),
    SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=12),
    SamplingParams(temperature=0.8, top_k=20, seed=2, max_tokens=6, ignore_eos=True),
]

llm = LLM(max_num_seqs=4, max_model_len=512)
for output in llm.generate(prompts, params):
    print(f"{output.request_id}: {output.finish_reason} after {len(output.token_ids)} tokens")
    print(f"   {output.text!r}")
