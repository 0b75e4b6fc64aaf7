"""Files that clients leave, and batches of requests from them, in OpenAI's format."""
