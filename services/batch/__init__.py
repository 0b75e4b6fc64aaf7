"""``farsight batch``: a file of requests in OpenAI's batch format, run as a Ray job that resumes after an early end."""
