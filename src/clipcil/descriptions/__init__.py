"""Sentences that tell classes apart, and the client that asks a language model for them."""
