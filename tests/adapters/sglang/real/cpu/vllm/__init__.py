"""What SGLang 0.5.23 imports of vLLM where there is no GPU, and never calls."""
