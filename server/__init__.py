"""The HTTP front end: OpenAI-compatible routes, streaming, and the client of the engine process."""
