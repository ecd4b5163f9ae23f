"""OpenAI's requests and responses: JSON → what is to be written, texts → JSON.

What a request asks for is done or refused; nothing is left out in silence.
"""

import time
import uuid
from dataclasses import dataclass

import torch

from plaingpt.data.chat_tokenizer import ends_of, is_chat
from plaingpt.inference.text_generator import fit_prompt, random_numbers
from plaingpt.serving.batching import Text
from plaingpt.system.errors import UserError
from plaingpt.system.files import parse_json

MAX_TEXTS = 128  # prompts × n of a request
MAX_STOPS = 16
# Parameters that this server has not, with the values that ask for nothing. `user` never does.
NEUTRAL = {
    'best_of': (1,), 'echo': (False,), 'suffix': ('',), 'logprobs': (False,),
    'top_logprobs': (0,), 'presence_penalty': (0, 0.0), 'frequency_penalty': (0, 0.0),
    'logit_bias': ({},), 'tools': ([],), 'tool_choice': ('none',), 'functions': ([],),
    'response_format': ({'type': 'text'},), 'modalities': (['text'],), 'store': (False,),
    'metadata': ({},)}
KNOWN = {'model', 'max_tokens', 'temperature', 'top_p', 'top_k', 'min_p', 'n', 'stop', 'seed',
         'stream', 'stream_options', 'user'}


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, message, param=None, status=400, code=None):
        super().__init__(message)
        self.status = status
        kind = 'server_error' if status >= 500 else 'invalid_request_error'
        self.body = {'error': {'message': message, 'type': kind, 'param': param, 'code': code}}


@dataclass
class Limits:
    """What the server has to offer."""

    model_name: str
    created: int
    max_tokens: int
    timeout_s: float
    body_bytes: int


@dataclass(eq=False)
class Job:
    """What a request asks for."""

    chat: bool
    stream: bool
    include_usage: bool
    prompt_tokens: int
    texts: list
    dropped: int = 0  # messages of a conversation that did not fit

    def __post_init__(self):
        self.created, self.began = int(time.time()), time.monotonic()
        self.id = ('chatcmpl-' if self.chat else 'cmpl-') + uuid.uuid4().hex
        for i, text in enumerate(self.texts):
            text.receiver, text.index = self, i


def read_body(data):
    """Bytes of a request → its JSON object. Raises Refused."""
    try:
        body = parse_json(data)
    except (ValueError, RecursionError) as e:
        raise Refused(f'the body is no JSON: {e}') from None
    if not isinstance(body, dict):
        raise Refused('the body is no JSON object')
    return {key: value for key, value in body.items() if value is not None}


def read_request(body, chat, tokenizer, block_size, limits):
    """The JSON of a request → a Job. Raises Refused."""
    check_names(body, chat, limits.model_name)
    cap = limits.max_tokens
    new = number(body, 'max_tokens', None, 1, cap, whole=True)
    new = number(body, 'max_completion_tokens', new, 1, cap, whole=True)
    if chat:
        prompts, dropped, room = read_conversation(body, tokenizer, block_size, new)
        new = min(new or cap, cap, room)
    else:
        kept = number(body, 'truncate_prompt_tokens', None, 1, block_size, whole=True)
        prompts, dropped = read_prompts(body.get('prompt'), tokenizer, block_size, kept), 0
        new = new or min(16, cap)
    n = number(body, 'n', 1, 1, MAX_TEXTS, whole=True)
    if n * len(prompts) > MAX_TEXTS:
        raise Refused(f'{len(prompts)} prompts and n={n}: at most {MAX_TEXTS} texts a request', 'n')
    texts = []
    for prompt, generator in zip([p for p in prompts for _ in range(n)],
                                 generators(body, n * len(prompts)), strict=True):
        texts.append(Text(prompt, new, choice_of(body), generator, ends_of(tokenizer),
                          read_stop(body)))
    options = body.get('stream_options', {})
    stream = flag(body, 'stream')
    if not isinstance(options, dict) or set(options) - {'include_usage', 'include_obfuscation'}:
        raise Refused('stream_options has include_usage only', 'stream_options')
    if options and not stream:
        raise Refused('stream_options goes with stream=true', 'stream_options')
    return Job(chat, stream, flag(options, 'include_usage'), sum(map(len, prompts)), texts, dropped)


def check_names(body, chat, model_name):
    """See that the request names this model, and no parameter that would change nothing."""
    own = {'messages', 'max_completion_tokens'} if chat else {'prompt', 'truncate_prompt_tokens'}
    for key, value in body.items():
        if key in NEUTRAL:
            if not any(type(value) is type(none) and value == none for none in NEUTRAL[key]):
                raise Refused(f'{key} is not supported: leave it out', key,
                              code='unsupported_parameter')
        elif key not in KNOWN | own:
            raise Refused(f'unknown parameter {str(key)[:60]!r}', str(key)[:60],
                          code='unknown_parameter')
    if not isinstance(body.get('model'), str):
        raise Refused(f'name the model: "model": "{model_name}"', 'model')
    if body['model'] != model_name:
        raise Refused(f'there is no model {body["model"][:60]!r}: this server has '
                      f'{model_name!r}', 'model', 404, 'model_not_found')


def number(body, key, default, low, high, whole=False, above=False):
    """body[key], a number from `low` (above: more than it) to `high`. Raises Refused."""
    value = body.get(key, default)
    if value is default:
        return default
    kinds = (int,) if whole else (int, float)
    if type(value) not in kinds or not (low < value <= high if above else low <= value <= high):
        raise Refused(f'{key} must be a {"whole " * whole}number '
                      f'{"above" if above else "from"} {low} {"and" if above else "to"} '
                      f'{"at most " * above}{high}', key)
    return value


def flag(body, key):
    if type(body.get(key, False)) is not bool:
        raise Refused(f'{key} must be true or false', key)
    return body.get(key, False)


def choice_of(body):
    """How tokens are chosen, as of Text.choice."""
    return (('min_p', number(body, 'min_p', 0.0, 0, 1)),
            ('temperature', number(body, 'temperature', 1.0, 0, 2)),
            ('top_k', number(body, 'top_k', 0, 0, 2**31, whole=True)),
            ('top_p', number(body, 'top_p', 1.0, 0, 1, above=True)))


def generators(body, count):
    """A source of random numbers for each text. With a seed, those of sample.py."""
    seed = number(body, 'seed', None, -2**63, 2**63 - 1, whole=True)
    for i in range(count):
        if seed is None:
            generator = torch.Generator()
            generator.seed()
        else:
            generator = random_numbers(seed, i)
        yield generator


def read_stop(body):
    stop = body.get('stop', [])
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or len(stop) > MAX_STOPS or not all(
            isinstance(each, str) and 0 < len(each) <= 1000 for each in stop):
        raise Refused(f'stop must be a text or a list of at most {MAX_STOPS} texts, each of 1 to '
                      '1000 characters', 'stop')
    return tuple(stop)


def read_prompts(prompt, tokenizer, block_size, kept=None):
    """A text, ids, or a list of such → lists of ids. kept: the last so many of each are. Raises
    Refused."""
    if isinstance(prompt, str) or is_ids(prompt):
        prompt = [prompt]
    if not isinstance(prompt, list) or not 0 < len(prompt) <= MAX_TEXTS:
        raise Refused(f'prompt must be a text, or a list of 1 to {MAX_TEXTS}', 'prompt')
    return [read_prompt(each, tokenizer, block_size, kept) for each in prompt]


def read_prompt(prompt, tokenizer, block_size, kept):
    if isinstance(prompt, str):
        try:
            ids = [int(i) for i in tokenizer.encode(prompt)]
        except UserError as e:
            raise Refused(f'prompt: {e}', 'prompt') from None
    elif is_ids(prompt):
        ids = prompt
        if not all(0 <= i < tokenizer.vocab_size for i in ids):
            raise Refused(f'prompt: ids are from 0 to {tokenizer.vocab_size - 1}', 'prompt')
    else:
        raise Refused('prompt must be a text, or a list of texts', 'prompt')
    if not ids and tokenizer.end_of_text is None:
        raise Refused('the prompt is empty: this model needs at least one character', 'prompt')
    ids = (ids or [tokenizer.end_of_text])[-(kept or 0):]  # each document begins with it
    check_length(ids, block_size, 'prompt')
    return ids


def is_ids(prompt):
    return isinstance(prompt, list) and prompt and all(type(i) is int for i in prompt)


def check_length(ids, block_size, param):
    if len(ids) > block_size:
        raise Refused(f'{param}: {len(ids):,} tokens, and the model reads at most {block_size:,}',
                      param, code='context_length_exceeded')


def read_conversation(body, tokenizer, block_size, new):
    """→ ([ids], how many of the oldest messages were dropped to make room, how many new tokens
    there is room for). Raises Refused."""
    if not is_chat(tokenizer):
        raise Refused('this model has no chat template, since it was not tuned on conversations: '
                      'use /v1/completions', 'messages')
    messages = body.get('messages')
    if not isinstance(messages, list) or not messages:
        raise Refused('messages must be a list of messages', 'messages')
    messages = [read_message(each, f'messages[{i}]', tokenizer.roles)
                for i, each in enumerate(messages)]
    if messages[-1]['role'] != 'user':
        raise Refused('the last of the messages must be one of the user', 'messages')
    try:
        ids, dropped, room = fit_prompt(tokenizer, messages, block_size, new or block_size)
    except UserError as e:
        raise Refused(f'messages: {e}', 'messages') from None
    check_length(ids, block_size, 'messages')
    return [ids], dropped, room


def read_message(message, where, roles):
    """→ {'role', 'content'}, a text each. Raises Refused."""
    if not isinstance(message, dict):
        raise Refused(f'{where} must be an object with a role and a content', where)
    message = {key: value for key, value in message.items() if value not in (None, [])}
    if message.get('role') == 'developer':  # OpenAI's newer name
        message['role'] = 'system'
    if message.get('role') not in list(roles):
        raise Refused(f'{where}: role must be {", ".join(roles)}', where)
    content = message.get('content')
    if isinstance(content, list) and all(isinstance(part, dict) and part.get('type') == 'text' and
                                         isinstance(part.get('text'), str) for part in content):
        content = ''.join(part['text'] for part in content)
    if not isinstance(content, str):
        raise Refused(f'{where}: content must be a text', where)
    if others := set(message) - {'role', 'content'}:
        raise Refused(f'{where}: {str(min(others))[:60]!r} is not supported', where)
    return {'role': message['role'], 'content': content}


# -----------------------------------------------------------------------------
# responses


def usage(job):
    completion = sum(text.n_tokens for text in job.texts)
    return {'prompt_tokens': job.prompt_tokens, 'completion_tokens': completion,
            'total_tokens': job.prompt_tokens + completion}


def envelope(job, limits, kind, choices):
    return {'id': job.id, 'object': kind, 'created': job.created, 'model': limits.model_name,
            'choices': choices}


def whole(job, limits, pieces, reasons):
    """The response that is not streamed. pieces, reasons: of each text"""
    choices = []
    for i, (text, reason) in enumerate(zip(pieces, reasons, strict=True)):
        content = {'message': {'role': 'assistant', 'content': text, 'refusal': None}} \
            if job.chat else {'text': text}
        choices.append({'index': i, **content, 'logprobs': None, 'finish_reason': reason})
    kind = 'chat.completion' if job.chat else 'text_completion'
    return {**envelope(job, limits, kind, choices), 'usage': usage(job)}


def chunk(job, limits, index, piece, reason, first=False):
    """A piece of a streamed response. first: it is the first of a text"""
    if job.chat:
        delta = {'role': 'assistant', 'content': ''} if first else \
            {'content': piece} if piece else {}
        content = {'delta': delta}
    else:
        content = {'text': piece}
    choice = {'index': index, **content, 'logprobs': None, 'finish_reason': reason}
    kind = 'chat.completion.chunk' if job.chat else 'text_completion'
    extra = {'usage': None} if job.include_usage else {}
    return {**envelope(job, limits, kind, [choice]), **extra}


def last_chunk(job, limits):
    kind = 'chat.completion.chunk' if job.chat else 'text_completion'
    return {**envelope(job, limits, kind, []), 'usage': usage(job)}


def model_entry(limits, tokenizer, block_size):
    return {'id': limits.model_name, 'object': 'model', 'created': limits.created,
            'owned_by': 'plaingpt', 'chat': is_chat(tokenizer),
            'context_length': block_size}
