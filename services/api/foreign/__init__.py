"""Request bodies of other APIs, and the chats that they become."""
