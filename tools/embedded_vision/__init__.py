"""The embedded vision model: its pictures, its training and its evaluation."""
