"""The commands that people type most: serve a model, chat with it, see what runs here and end it."""
