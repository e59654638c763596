"""Text generation: requests, sampling and tokens around the transformers library's continuous batching."""
