"""OpenAI's API in JSON: a request → what is to be written, a text → a response.

What a request asks for is done or refused; nothing is left out in silence.
"""

import asyncio
import json
import secrets
import time
from dataclasses import dataclass, field

from configurator import checked
from plaingpt.data.conversations import ROLES
from plaingpt.inference.text_generator import Sampling, answering, parse_asked
from plaingpt.system.errors import UserError
from plaingpt.system.formatting import one_line
from plaingpt.system.streams import warn

SAMPLING = {'temperature': 1.0, 'top_p': 1.0, 'top_k': 0, 'min_p': 0.0, 'repetition_penalty': 1.0,
            'seed': 0}  # OpenAI's defaults; without a seed, each text gets one of its own
CHAT_ROLES = {**{role: role for role in ROLES}, 'developer': 'system'}  # OpenAI's newer name
# What a request may have; the type of a value is that of the value here.
PARAMETERS = {**SAMPLING, 'model': '', 'messages': [], 'prompt': '', 'max_tokens': 0,
              'max_completion_tokens': 0, 'stop': [], 'stream': False, 'stream_options': {},
              'user': ''}
# What some clients always send. With other values these are refused, as all other parameters are.
NEUTRAL = {'n': 1, 'presence_penalty': 0, 'frequency_penalty': 0, 'tools': [],
           'response_format': {'type': 'text'}}


class Refused(UserError):
    """A request that is answered with this HTTP status; any other UserError is a 400."""

    def __init__(self, status, code, message):
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(eq=False)
class Job:
    """What a request asks for."""

    chat: bool
    model: str
    stream: bool
    include_usage: bool  # at the end of a stream
    ids: list  # the prompt
    unseen: int  # how many of the oldest messages, or first tokens of a prompt, do not fit
    sampling: Sampling
    stop: list
    # and what becomes of it
    pieces: asyncio.Queue = field(default_factory=asyncio.Queue)  # of its text; the last is None
    future: asyncio.Future | None = None  # of (text, finish_reason, number of tokens)
    left: bool = False  # the client waits no longer
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    created: int = field(default_factory=lambda: int(time.time()))

    def leave(self):
        self.left = True
        self.future.cancel()


def read_job(body, chat, generator, name, max_tokens):
    """The JSON of a request → a Job. Raises UserError, beginning with the parameter.

    chat: of /v1/chat/completions; name: of the model; max_tokens: of a text at most
    """
    if not isinstance(body, dict):
        raise UserError('the body must be a JSON object')
    body = {key: value for key, value in body.items() if value is not None}
    if isinstance(body.get('stop'), str):
        body['stop'] = [body['stop']]
    check_parameters(body)
    if body.get('model') != name:
        raise Refused(404, 'model_not_found', f'model must be {name!r}: this server has no other')
    usual = max_tokens if chat else min(16, max_tokens)  # as OpenAI has it
    wanted = body.get('max_completion_tokens', body.get('max_tokens', usual))
    if not 1 <= wanted <= max_tokens:
        raise UserError(f'max_tokens must be from 1 to {max_tokens}')
    sampling = checked(Sampling, {
        **SAMPLING, 'seed': secrets.randbits(62), 'max_new_tokens': wanted,
        **{key: body[key] for key in SAMPLING if key in body}})
    if chat:
        ids, unseen, room = generator.fit(parse_asked(body.get('messages'), CHAT_ROLES), wanted)
        sampling = answering(sampling, room)
    else:
        ids = generator.encode(body.get('prompt', ''), 'prompt')
        unseen = max(0, len(ids) - generator.model.config.block_size)
    options = body.get('stream_options', {})
    return Job(chat, name, body.get('stream', False), options.get('include_usage') is True, ids,
               unseen, sampling, body.get('stop', []))


def check_parameters(body):
    """See that all of them are known, and of the right type."""
    for key, value in body.items():
        if key not in PARAMETERS:
            if key not in NEUTRAL or value != NEUTRAL[key]:
                raise Refused(400, 'unsupported_parameter', f'{key} is not supported: leave it out')
            continue
        kind = type(PARAMETERS[key])
        if type(value) is not kind and (kind, type(value)) != (float, int):
            raise UserError(f'{key} must be of type {kind.__name__}')
    stop = body.get('stop', [])
    if len(stop) > 16 or not all(isinstance(text, str) and 0 < len(text) < 1000 for text in stop):
        raise UserError('stop must be a text or at most 16, of 1 to 999 characters each')


def response(job, text, reason=None, n_tokens=None, first=False):
    """The answer to a job, or a piece of a stream. n_tokens: of the whole text, when it is known;
    first: of the pieces"""
    kind, said = 'text_completion', {'text': text}
    if job.chat:
        kind = 'chat.completion' + '.chunk' * job.stream
        message = {'role': 'assistant', 'content': text}
        said = {'message': message} if not job.stream else \
            {'delta': message if first else {'content': text}}
    found = {'id': job.id, 'object': kind, 'created': job.created, 'model': job.model,
             'choices': [{'index': 0, **said, 'logprobs': None, 'finish_reason': reason}]}
    if n_tokens is not None:
        found['usage'] = {'prompt_tokens': len(job.ids), 'completion_tokens': n_tokens,
                          'total_tokens': len(job.ids) + n_tokens}
    return found


async def events(job):
    """Yield a stream's server-sent events, as the pieces of the text come."""
    def event(value):
        return f'data: {json.dumps(value)}\n\n'

    try:
        yield event(response(job, '', first=True))
        while (piece := await job.pieces.get()) is not None:
            yield event(response(job, piece))
        _, reason, n_tokens = await job.future
        yield event(response(job, '', reason))
        if job.include_usage:
            yield event({**response(job, '', n_tokens=n_tokens), 'choices': []})
        yield 'data: [DONE]\n\n'
    except Exception as e:
        yield event(error(e)[1])


def error(e):
    """An exception → (HTTP status, OpenAI's JSON of it). A failure of ours is told on stderr, too.
    """
    status = 400 if isinstance(e, UserError) else 500
    status = getattr(e, 'status', getattr(e, 'status_code', status))  # of Refused, of Starlette
    code, message = getattr(e, 'code', None), one_line(e)
    if status == 500:
        message = f'the server failed: {type(e).__name__}: {message}'
        warn(message)
    first = message.replace('=', ' ').replace(':', ' ').split(' ')[0]
    return status, {'error': {
        'message': message, 'code': code,
        'type': 'server_error' if status >= 500 else 'invalid_request_error',
        'param': first if first in PARAMETERS or code == 'unsupported_parameter' else None}}
