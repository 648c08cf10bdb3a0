"""prefixproxy: an OpenAI-compatible reverse proxy that makes the local KV cache hit."""

__version__ = "0.1.0"
