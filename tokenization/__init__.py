"""Text to token ids and back: one way to load a tokenizer, plain text that stays plain, output decoded as it comes.

Knows neither torch nor HTTP nor ``transformers``: the engine and the ingress share it.
"""
