"""
More wordings for Pebble's topics, as users type them.

The original wordings stay unchanged, because the model card's figures were measured with them.
"""

from __future__ import annotations

from typing import Final

from cairn_pebble.texts.small_talk import TOPICS, Topic

_MORE: Final = {
    "Hello! I am Pebble": ("yo", "hiya", "hello again", "hey you", "howdy", "anyone there?"),
    "Good morning!": ("mornin", "good morning everyone", "a good morning to all", "top of the day"),
    "Good night!": ("nighty night", "off to sleep now", "I'm going to sleep", "sweet dreams"),
    "I am fine": (
        "how's it going?",
        "how have you been?",
        "you alright?",
        "what's up?",
        "all good?",
    ),
    "I am glad": ("I'm happy", "today is a good day", "I could not be better", "life is good"),
    "I am sorry to hear": ("I feel lonely", "I'm exhausted", "not so well", "I have a headache"),
    "You are welcome": (
        "thx",
        "cheers",
        "that was kind of you",
        "much obliged",
        "great, thank you",
    ),
    "Goodbye!": ("cu", "I'm off", "talk to you tomorrow", "farewell", "that's it for today, bye"),
    "I am Pebble, a very small": (
        *("what kind of model are you?", "which model is this?", "who is speaking?"),
        *("are you a chatbot?", "what am I talking to here?", "say something about yourself"),
    ),
    "I have about two million": (
        *(
            "how many weights do you have?",
            "are you a large model?",
            "what's your parameter count?",
        ),
        *("how much memory do you take?",),
    ),
    "I can remember what": (
        *("what are your skills?", "show me what you've got", "what do you do?", "what now?"),
        *("I don't know what to ask", "what is possible here?", "how does this work?"),
    ),
    "Much. I know little": ("where do you fail?", "what's too hard for you?", "can you code?"),
    "I was trained from": (
        *("where did your training data come from?", "who built you?", "what data were you fed?"),
        *("are you based on another model?",),
    ),
    "Cairn is a server": (
        *("what does this software do?", "what is this server?", "give me the gist of Cairn"),
        *("I am new here, what is this program?", "Cairn, what is that?"),
    ),
    "A cairn is a pile": ("what's a cairn anyway?", "why this name?", "piles of stones, why?"),
    "A KV cache holds": ("what does KV stand for?", "kv cache?", "what are keys and values for?"),
    "The journal is where": ("what gets written down?", "what is in the journal?", "a journal?"),
    "In Cairn a cache hit": (
        "why not use another server?",
        "what do I gain?",
        "what is so good here?",
    ),
    "Run `ops verify`": (
        "is my journal intact?",
        "how do I know nothing is broken?",
        "ops verify?",
    ),
    "Run `ops replay`": ("what happened in my last session?", "I have a bug id, now what?"),
    "Start the server with": (
        "I want a smarter model",
        "load another model",
        "how to switch models?",
    ),
    "No. Cairn runs on": ("is this stored in the cloud?", "are you online?", "do you spy on me?"),
    "Yes, as long as it": (
        "do you forget things?",
        "how long is your memory?",
        "will you forget me?",
    ),
    "No, I cannot see the": ("do I need an umbrella?", "is it sunny?", "any snow today?"),
    "I do not know the time": (
        "is it late?",
        "which year is it?",
        "what's today's date?",
        "the time?",
    ),
    "Why did the stone": ("be funny", "know any good jokes?", "cheer me up", "one more joke"),
    "A stone lay by": ("I'd like to hear a tale", "once upon a time?", "tell the kids a story"),
    "I like grey best": ("what's the nicest colour?", "your favourite colour?", "red or blue?"),
    "No, I am a program": ("do you have a body?", "can you feel pain?", "are you conscious?"),
    "I speak English only": (
        "parlez-vous?",
        "is English your only language?",
        "speak Italian to me",
    ),
    "Yes. Give me tools": ("do you support function calling?", "what about MCP?", "tools?"),
    "Yes, when you ask me": ("can you reason?", "how do I switch thinking on?", "think harder"),
    "All right.": ("k", "got it", "makes sense", "alright", "fair enough", "I understand", "nice"),
    "I am sorry. Say it": (
        "that's nonsense",
        "what?",
        "you misunderstood",
        "not what I meant",
        "huh?",
    ),
    "I do not know that": ("what's the news?", "do my homework", "tell me a fact", "count to ten"),
}


def topic_of(opening: str) -> Topic:
    """The topic whose answer begins with this text."""
    (found,) = (one for one in TOPICS if one.answer.startswith(opening))
    return found


MORE_ASKED: Final = tuple((topic_of(opening), asked) for opening, asked in _MORE.items())
"""Topics with additional wordings."""
