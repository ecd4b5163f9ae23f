"""A conversation → the prompt of its next answer, in the room that the context has."""

from bisect import bisect_left


def fit_prompt(tokenizer, messages, block_size, new_tokens):
    """→ (ids, how many of the oldest messages were left out, how many new tokens there is room for)

    messages: [{'role', 'content'}, …], as encode_conversation takes them
    new_tokens: that the answer may have; a quarter of block_size is kept free for them at most

    What the system says at the beginning stays, and so do the last message of the user and what
    follows it, even where these alone are longer. Raises UserError where a text has characters that
    the tokenizer lacks.
    """
    users = [i for i, message in enumerate(messages) if message['role'] == 'user']
    wanted = block_size - min(new_tokens, block_size // 4)

    def encode(turns):
        """Without so many of the oldest turns."""
        return tokenizer.encode_prompt(messages[:users[0]] + messages[users[turns]:]).tolist()

    turns = bisect_left(range(len(users) - 1), True,
                        key=lambda turns: len(encode(turns)) <= wanted)
    ids = encode(turns)
    return ids, users[turns] - users[0], block_size - len(ids) + 1
