"""Serve a model over HTTP with OpenAI's API, one request at a time.

    python serve.py out

/v1/chat/completions takes `messages` and /v1/completions takes a `prompt`. Both take stream, stop,
max_tokens, temperature, top_p, seed and logprobs, and top_k, repetition_penalty and continue_text
as in sample.py; chats also top_logprobs. Other options of OpenAI's API are accepted only with
values that change nothing, such as n=1.
"""

import asyncio
import json
import os
import re
import secrets
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from itertools import accumulate

from configurator import checked, load_config
from plaingpt.data.tokenizers import token_text
from plaingpt.inference.open_weights import GeneratorChoice, open_generator
from plaingpt.inference.text_generator import Logprobs, Sampling, list_stop_strings
from plaingpt.system.errors import UserError, needs, run_script
from plaingpt.system.formatting import printable

LOOPBACK = re.compile(r'[\w+.-]+://(localhost|127\.0\.0\.1|::1|\[::1\])(:\d+)?', re.IGNORECASE)
MAX_QUEUED = 16  # requests that wait for the current one; more are refused
REQUEST_TIMEOUT = 10  # seconds for the headers of a request, and again for its body
MAX_BODY_BYTES = 2**20
MAX_STOP_CHARS = 1000  # in all stop strings of a request together
MAX_UNREAD = 100  # pieces of a stream; a request with more of them unread lets others generate
SEND_BUFFER_BYTES = 2**16  # the system's; its default would buffer minutes of a stream
UNREAD_TIMEOUT = 60  # seconds that a client may leave its response unread
MAX_LOGPROBS = 20  # likely tokens per token, as in OpenAI's chat API
# OpenAI's names → ours
SAMPLING_NAMES = {'max_tokens': 'max_new_tokens', 'max_completion_tokens': 'max_new_tokens'}
IGNORED = ('model', 'user', 'metadata', 'store', 'service_tier', 'parallel_tool_calls',
           'safety_identifier', 'prompt_cache_key')
ACCEPTED = {  # option of OpenAI's API → values that change nothing; all others are refused
    'stream_options': [{}, {'include_usage': False}, {'include_usage': True}],
    'n': [1], 'best_of': [1], 'presence_penalty': [0], 'frequency_penalty': [0],
    'logit_bias': [{}], 'tools': [[]], 'tool_choice': ['none', 'auto'], 'functions': [[]],
    'echo': [False], 'modalities': [['text']], 'response_format': [{'type': 'text'}]}


@dataclass
class ServeConfig(GeneratorChoice):
    host: str = '127.0.0.1'  # bind address; 0.0.0.0 accepts remote clients, needs PLAINGPT_API_KEY
    port: int = 8000  # port to listen on; 0: any free port

    def out_of_range(self):
        return [] if 0 <= self.port < 65536 else [f'port={self.port}: must be from 0 to 65535']


class Server:
    def __init__(self, generator, key):
        self.generator = generator
        self.key = key
        # With a key any origin is allowed, because browsers do not send the key on their own.
        self.allowed = re.compile('.*') if key else LOOPBACK
        self.slots = asyncio.Semaphore(1 + MAX_QUEUED)
        self.executor = ThreadPoolExecutor(1 + MAX_QUEUED)
        self.turn = threading.Lock()  # held by the request whose tokens are computed

    def check_access(self, request):
        """Refuse requests from other machines and websites, and those without the key if one is
        set."""
        from starlette.exceptions import HTTPException
        host, origin = request.headers.get('host', ''), request.headers.get('origin')
        key = request.headers.get('authorization', '').removeprefix('Bearer ')
        advice = 'only this machine is served; to serve others, set PLAINGPT_API_KEY'
        if not self.allowed.fullmatch(f'http://{host}'):
            raise HTTPException(400, f'Host: {host}: {advice}')
        if origin and not self.allowed.fullmatch(origin):
            raise HTTPException(403, f'Origin: {origin}: {advice}')
        if self.key and not secrets.compare_digest(key.encode(), self.key.encode()):
            raise HTTPException(401, 'API key: missing or wrong; send "Authorization: Bearer KEY"')

    async def models(self, request):
        from starlette.responses import JSONResponse
        self.check_access(request)
        model = {'id': 'plaingpt', 'object': 'model', 'created': 0, 'owned_by': 'plaingpt'}
        return JSONResponse({'object': 'list', 'data': [model]})

    async def __call__(self, scope, receive, send):
        from starlette.exceptions import HTTPException
        from starlette.requests import Request
        from starlette.responses import StreamingResponse
        request = Request(scope, receive)
        body = bytearray()
        async with asyncio.timeout(REQUEST_TIMEOUT):
            async for chunk in request.stream():  # read it all: clients send before they read
                if len(body) <= MAX_BODY_BYTES:
                    body += chunk
        self.check_access(request)
        if request.headers.get('content-type', '').split(';')[0].lower() != 'application/json':
            raise HTTPException(415, 'send the header "Content-Type: application/json"')
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, f'the body has more than {MAX_BODY_BYTES:,} bytes')
        completion = await asyncio.to_thread(
            Completion, copy(self.generator), 'chat' in scope['path'], body)
        if self.slots.locked():
            raise HTTPException(429, 'too many requests are queued; try again later')
        async with self.slots:
            loop = asyncio.get_running_loop()
            future = loop.run_in_executor(self.executor, completion.generate, self.turn, loop,
                                          self.uvicorn)
            media_type = 'text/event-stream' if completion.options.stream else 'application/json'
            # Always a StreamingResponse: Starlette cancels it if the client disconnects.
            response = StreamingResponse(completion.respond(future), media_type=media_type)
            try:
                await response(scope, receive, send)
            finally:
                future.cancel()
                completion.cancel()


@dataclass
class Options(Sampling):
    """Options of a request, with OpenAI's defaults."""
    temperature: float = 1.0
    top_k: int = 0
    stream: bool = False
    logprobs: int | bool = False  # /v1/completions: number of likely tokens; chat: whether
    top_logprobs: int = 0  # /v1/chat/completions: number of likely tokens

    def out_of_range(self):
        return super().out_of_range() + [
            f'{name}={getattr(self, name)}: must be from 0 to {MAX_LOGPROBS}'
            for name in ('logprobs', 'top_logprobs')
            if not 0 <= getattr(self, name) <= MAX_LOGPROBS]

    def conflicts(self):
        if self.top_logprobs and not self.logprobs:
            return ['top_logprobs: has no effect without logprobs=true']
        return []


class Completion:
    def __init__(self, generator, is_chat, body):
        """generator: a copy for this request; body: JSON. Raises UserError."""
        self.generator = generator
        self.is_chat = is_chat
        self.pieces = asyncio.Queue()  # (text, its tokens in Logprobs)
        self.room = threading.Semaphore(MAX_UNREAD)  # for pieces
        self.n_sent = 0  # characters whose Logprobs were sent
        self.header = {'id': secrets.token_hex(16), 'created': int(time.time()),
                       'model': 'plaingpt'}
        options = parse_options(body)
        self.include_usage = options.get('stream_options') == {'include_usage': True}
        accepted = ACCEPTED if is_chat else ACCEPTED | {'top_logprobs': [0]}
        for name in accepted.keys() & options.keys():
            value = options.pop(name)
            if value not in accepted[name]:
                raise UserError(f'{name!r}={value!r:.99}: expected one of {accepted[name]}')
        self.stop = list_stop_strings(options.pop('stop', ''))
        if sum(map(len, self.stop)) > MAX_STOP_CHARS:
            raise UserError(f'stop: expected at most {MAX_STOP_CHARS:,} characters')
        prompt = options.pop('messages' if is_chat else 'prompt', '')
        self.options = checked(Options, {'seed': secrets.randbits(62)} | options)
        self.logprobs = None
        if self.options.logprobs is not False:
            self.logprobs = Logprobs(
                self.options.top_logprobs if is_chat else int(self.options.logprobs))
        if is_chat:
            self.ids, self.options = generator.prepare_answer(prompt, self.options)
        else:
            self.ids = generator.encode(prompt, 'prompt', self.options.continue_text)

    def generate(self, turn, loop, server):
        """→ the text, and its tokens with logprobs; of a stream, only what was not put in `pieces`.
        Stops early if the client disconnects or the server shuts down."""
        def on_text(text):
            if server.should_exit:
                self.generator.cancelled = True
            if self.generator.cancelled or not self.options.stream:
                return
            if not self.room.acquire(blocking=False):  # the client is slow: others take their turn
                turn.release()
                self.room.acquire()
                turn.acquire()
            if not self.generator.cancelled:  # else the event loop may be closed
                loop.call_soon_threadsafe(self.pieces.put_nowait, (text, self.take_tokens()))

        with turn:
            if self.generator.cancelled:
                return '', []
            [text] = self.generator.generate_texts(
                [self.ids], [0], self.options, self.stop, on_text, self.logprobs)
        return '' if self.options.stream else text, self.take_tokens()

    def take_tokens(self):
        """→ the tokens that Logprobs has completed since the last call."""
        tokens = []
        if self.logprobs:
            tokens, self.logprobs.completed = self.logprobs.completed, []
        return tokens

    def cancel(self):
        """End the generation, also while it waits for room."""
        self.generator.cancelled = True
        self.room.release()

    async def respond(self, future):
        """Yield the body of the response. future: of generate(), which is running"""
        future.add_done_callback(lambda _: self.pieces.put_nowait(None))
        stream = self.options.stream
        if stream:
            yield self.format('', role='assistant')
            while piece := await self.pieces.get():
                yield self.format(*piece)
                self.room.release()
        text, tokens = await future
        n_tokens = self.generator.tokens
        if self.generator.cancelled:
            return  # no finish_reason: the text is incomplete
        reason = 'length' if n_tokens == self.options.max_new_tokens else 'stop'
        usage = {'prompt_tokens': len(self.ids), 'completion_tokens': n_tokens,
                 'total_tokens': len(self.ids) + n_tokens}
        if not stream:
            yield self.format(text, tokens, reason, usage, role='assistant')
            return
        yield self.format(text, tokens, reason)
        if self.include_usage:
            yield self.format('', usage=usage)
        yield 'data: [DONE]\n\n'

    def format(self, text, tokens=(), reason=None, usage=None, **role):
        """A response object, or a chunk of a stream, as text. tokens: completed ones of Logprobs"""
        if not self.is_chat:
            object_type = 'text_completion'
            content = {'text': text}
        elif self.options.stream:
            object_type = 'chat.completion.chunk'
            content = {'delta': {**role, 'content': text}}
        else:
            object_type = 'chat.completion'
            content = {'message': {**role, 'content': text}}
        logprobs = self.format_logprobs(tokens) if tokens else None
        choices = [{'index': 0, **content, 'logprobs': logprobs, 'finish_reason': reason}]
        if self.options.stream and usage:
            choices = []
        response = json.dumps(
            {**self.header, 'object': object_type, 'usage': usage, 'choices': choices})
        return f'data: {response}\n\n' if self.options.stream else response

    def format_logprobs(self, tokens):
        """Completed tokens of Logprobs → OpenAI's object"""
        def entry(token, logprob):
            tokenizer = self.generator.tokenizer
            return {'token': token_text(tokenizer, token), 'logprob': logprob,
                    'bytes': [*tokenizer.decode_bytes([token])]}

        entries = []  # of each token, then of the likeliest ones in its place
        for text, token, logprobs in tokens:
            top = [entry(*likely) for likely in logprobs.items()]
            entries.append({**entry(token, logprobs.get(token)), 'token': text,
                            'top_logprobs': top})
        if self.is_chat:
            for token in entries:
                del token['top_logprobs'][self.logprobs.n_top:]
            return {'content': entries, 'refusal': None}
        texts = [token['token'] for token in entries]
        offsets = [*accumulate(map(len, texts), initial=self.n_sent)]
        self.n_sent = offsets.pop()
        return {'tokens': texts, 'token_logprobs': [token['logprob'] for token in entries],
                'top_logprobs': [{top['token']: top['logprob'] for top in token['top_logprobs']}
                                 or None for token in entries], 'text_offset': offsets}


def parse_options(body):
    """The JSON body of a request → its options by our names, without null and ignored ones. Raises
    UserError."""
    try:
        options = json.loads(body)
        json.dumps(options, ensure_ascii=False).encode()  # fails for unpaired surrogates
        return {SAMPLING_NAMES.get(name, name): value for name, value in options.items()
                if value is not None and name not in IGNORED}
    except (AttributeError, ValueError, RecursionError):
        raise UserError('the body must be a JSON object of Unicode text') from None


def error_response(request, error):
    """The response to an invalid request."""
    from starlette.responses import JSONResponse
    message = getattr(error, 'detail', str(error))
    message = message or f'the request took longer than {REQUEST_TIMEOUT} s to arrive'
    body = {'message': printable(message)[:1000], 'type': 'invalid_request_error'}
    return JSONResponse({'error': body}, getattr(error, 'status_code', 400))


def main(argv):
    config = load_config(ServeConfig, argv, __doc__, positional='out_dir')
    key = os.environ.get('PLAINGPT_API_KEY', '')
    if not key and not LOOPBACK.fullmatch(f'http://{config.host}'):
        raise UserError(f'host={config.host}: remote access requires an API key; set '
                        'PLAINGPT_API_KEY')
    if not re.fullmatch('[!-~]*', key):  # what an HTTP header can hold
        raise UserError('PLAINGPT_API_KEY: use only ASCII letters, digits and punctuation')
    with needs('starlette uvicorn', 'serve.py'):
        import uvicorn
        from starlette.applications import Starlette
        from starlette.exceptions import HTTPException
        from starlette.middleware.cors import CORSMiddleware
        from starlette.requests import ClientDisconnect
        from uvicorn.protocols.http.auto import AutoHTTPProtocol

    class Connection(AutoHTTPProtocol):
        def connection_made(self, transport):
            super().connection_made(transport)
            transport.get_extra_info('socket').setsockopt(
                socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            transport.set_write_buffer_limits(0)  # pause_writing() whenever the client is behind
            self.loop.call_later(REQUEST_TIMEOUT, self.close_if_idle)

        def close_if_idle(self):
            if not self.cycle:  # no request so far
                self.transport.close()

        def pause_writing(self):
            super().pause_writing()
            self.unread_timer = self.loop.call_later(UNREAD_TIMEOUT, self.transport.abort)

        def resume_writing(self):
            super().resume_writing()
            self.unread_timer.cancel()

    server = Server(open_generator(config), key)
    client_errors = (UserError, HTTPException, TimeoutError, ClientDisconnect, RecursionError,
                     ValueError)  # tiktoken raises it for a million spaces
    app = Starlette(exception_handlers=dict.fromkeys(client_errors, error_response))
    app.add_route('/v1/models', server.models)
    for path in '/v1/chat/completions', '/v1/completions':
        app.add_route(path, server, ['POST'])
    app.add_middleware(CORSMiddleware, allow_origin_regex=server.allowed, allow_methods=['*'],
                       allow_headers=['*'], allow_private_network=True)
    server.uvicorn = uvicorn.Server(uvicorn.Config(
        app, host=config.host, port=config.port, http=Connection, ws='none',
        headers=[('Connection', 'close')], limit_concurrency=64, timeout_graceful_shutdown=5))
    server.uvicorn.run()


if __name__ == '__main__':
    run_script(main)
