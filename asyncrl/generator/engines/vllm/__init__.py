"""vLLM inside the generator process, with one weight receiver per rank."""
