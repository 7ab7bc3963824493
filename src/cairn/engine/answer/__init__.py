"""From sampled tokens to text, thoughts and tool calls; constrained decoding."""
