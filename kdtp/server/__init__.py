"""The HTTP endpoint: OpenAI's API in front of an engine that runs in processes of its own (extra `serve`)."""
