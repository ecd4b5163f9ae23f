"""Serve a model over HTTP with OpenAI's API, one request at a time.

    python serve.py out

/v1/chat/completions takes `messages` and /v1/completions takes a `prompt`. Both take stream, stop,
max_tokens, temperature, top_p and seed, and top_k, repetition_penalty and continue_text as in
sample.py. Other options of OpenAI's API are accepted only with values that change nothing, such as
n=1.
"""

import asyncio
import json
import os
import re
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass

from configurator import checked, load_config
from plaingpt.inference.open_weights import GeneratorChoice, open_generator
from plaingpt.inference.text_generator import Sampling, list_stop_strings
from plaingpt.system.errors import UserError, needs, run_script
from plaingpt.system.formatting import printable

LOOPBACK = re.compile(r'[\w+.-]+://(localhost|127\.0\.0\.1|::1|\[::1\])(:\d+)?', re.IGNORECASE)
MAX_QUEUED = 16  # requests that wait for the current one; more are refused
REQUEST_TIMEOUT = 10  # seconds for the headers of a request, and again for its body
MAX_BODY_BYTES = 2**20
MAX_STOP_CHARS = 1000  # in all stop strings of a request together
MAX_UNREAD = 10_000  # pieces of a stream; a client with more of them unread has disconnected
# OpenAI's names → ours
SAMPLING_NAMES = {'max_tokens': 'max_new_tokens', 'max_completion_tokens': 'max_new_tokens'}
IGNORED = ('model', 'user', 'metadata', 'store', 'service_tier', 'parallel_tool_calls',
           'safety_identifier', 'prompt_cache_key')
ACCEPTED = {  # option of OpenAI's API → values that change nothing; all others are refused
    'stream_options': [{}, {'include_usage': False}, {'include_usage': True}],
    'stream': [False, True], 'n': [1], 'best_of': [1], 'presence_penalty': [0],
    'frequency_penalty': [0], 'logprobs': [False], 'top_logprobs': [0], 'logit_bias': [{}],
    'tools': [[]], 'tool_choice': ['none', 'auto'], 'functions': [[]], 'echo': [False],
    'modalities': [['text']], 'response_format': [{'type': 'text'}]}


@dataclass
class ServeConfig(GeneratorChoice):
    host: str = '127.0.0.1'  # bind address; 0.0.0.0 accepts remote clients, needs PLAINGPT_API_KEY
    port: int = 8000  # 0: a free port

    def out_of_range(self):
        return [] if 0 <= self.port < 65536 else [f'port={self.port}: must be from 0 to 65535']


class Server:
    def __init__(self, generator, key):
        self.generator = generator
        self.key = key
        # With a key any origin is allowed, because browsers do not send the key on their own.
        self.allowed = re.compile('.*') if key else LOOPBACK
        self.slots = asyncio.Semaphore(1 + MAX_QUEUED)
        self.executor = ThreadPoolExecutor(1)

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
        await self.slots.acquire()
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self.executor, completion.generate, loop, self.uvicorn)
        future.add_done_callback(lambda _: self.slots.release())
        media_type = 'text/event-stream' if completion.stream else 'application/json'
        # Always a StreamingResponse: Starlette cancels it if the client disconnects.
        response = StreamingResponse(completion.respond(future), media_type=media_type)
        try:
            await response(scope, receive, send)
        finally:
            completion.generator.cancelled = True
            future.cancel()


class Completion:
    def __init__(self, generator, is_chat, body):
        """generator: a copy for this request; body: JSON. Raises UserError."""
        self.generator = generator
        self.is_chat = is_chat
        self.pieces = asyncio.Queue()
        self.header = {'id': secrets.token_hex(16), 'created': int(time.time()),
                       'model': 'plaingpt'}
        options = parse_options(body)
        self.stream = options.get('stream', False)
        self.include_usage = options.get('stream_options') == {'include_usage': True}
        for name in ACCEPTED.keys() & options.keys():
            value = options.pop(name)
            if value not in ACCEPTED[name]:
                raise UserError(f'{name!r}={value!r:.99}: expected one of {ACCEPTED[name]}')
        self.stop = list_stop_strings(options.pop('stop', ''))
        if sum(map(len, self.stop)) > MAX_STOP_CHARS:
            raise UserError(f'stop: expected at most {MAX_STOP_CHARS:,} characters')
        prompt = options.pop('messages' if is_chat else 'prompt', '')
        openai_defaults = {'temperature': 1.0, 'top_k': 0, 'seed': secrets.randbits(62)}
        self.sampling = checked(Sampling, openai_defaults | options)
        if is_chat:
            self.ids, self.sampling = generator.prepare_answer(prompt, self.sampling)
        else:
            self.ids = generator.encode(prompt, 'prompt', self.sampling.continue_text)

    def generate(self, loop, server):
        """→ the text. Stops early if the client disconnects or the server shuts down."""
        def on_text(piece):
            if self.stream:
                loop.call_soon_threadsafe(self.pieces.put_nowait, piece)
            if server.should_exit or self.pieces.qsize() > MAX_UNREAD:
                self.generator.cancelled = True
        [text] = self.generator.generate_texts([self.ids], [0], self.sampling, self.stop, on_text)
        return text

    async def respond(self, future):
        """Yield the body of the response. future: the result of generate(), which is running"""
        future.add_done_callback(lambda _: self.pieces.put_nowait(''))
        if self.stream:
            yield self.format('', role='assistant')
            while piece := await self.pieces.get():
                yield self.format(piece)
        text = await future
        tokens = self.generator.tokens
        if self.generator.cancelled:
            return  # no finish_reason: the text is incomplete
        reason = 'length' if tokens == self.sampling.max_new_tokens else 'stop'
        usage = {'prompt_tokens': len(self.ids), 'completion_tokens': tokens,
                 'total_tokens': len(self.ids) + tokens}
        if not self.stream:
            yield self.format(text, reason, usage, role='assistant')
            return
        yield self.format('', reason)
        if self.include_usage:
            yield self.format('', usage=usage)
        yield 'data: [DONE]\n\n'

    def format(self, text, reason=None, usage=None, **role):
        """A response object, or a chunk of a stream, as text."""
        if not self.is_chat:
            object_type = 'text_completion'
            content = {'text': text}
        elif self.stream:
            object_type = 'chat.completion.chunk'
            content = {'delta': {**role, 'content': text}}
        else:
            object_type = 'chat.completion'
            content = {'message': {**role, 'content': text}}
        choices = [{'index': 0, **content, 'finish_reason': reason}]
        if self.stream and usage:
            choices = []
        response = json.dumps(
            {**self.header, 'object': object_type, 'usage': usage, 'choices': choices})
        return f'data: {response}\n\n' if self.stream else response


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
            self.loop.call_later(REQUEST_TIMEOUT, self.close_if_idle)

        def close_if_idle(self):
            if not self.cycle:  # no request so far
                self.transport.close()

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
