"""Routes of other APIs, answered by the same chats: Anthropic's messages and OpenAI's responses."""
