"""Text to token ids and back: tokenizers, chat templates and streams of text. Runs no code of a model folder."""
