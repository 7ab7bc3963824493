"""What dialogues are made of: wordings, facts, tools, and kinds of dialogues built from them."""
