"""DeepSeek-V4.1-Flash, written on the named ops of `graphs.ops`."""
