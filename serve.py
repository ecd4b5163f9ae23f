"""Answer requests over HTTP as OpenAI's API does, one after another.

    python serve.py out

/v1/chat/completions takes `messages`, and /v1/completions a `prompt`; both take stream, stop,
max_tokens, temperature, top_p, seed, and of sample.py top_k and repetition_penalty. Other options
of OpenAI's API are accepted where they ask for nothing, such as n=1, and refused otherwise.
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
from plaingpt.inference.text_generator import Sampling, list_stops
from plaingpt.system.errors import UserError, needs, run_script
from plaingpt.system.formatting import printable
from plaingpt.training.open_weights import GeneratorChoice, open_generator

LOOPBACK = re.compile(r'[\w+.-]+://(localhost|127\.0\.0\.1|::1|\[::1\])(:\d+)?', re.IGNORECASE)
WAITING = 16  # requests that wait for the one that is answered; more are refused
SECONDS = 10  # for the headers of a request to arrive, and again for its body
MAX_BYTES = 2**20  # in a body
MAX_STOP = 1000  # characters in all stop strings together
UNREAD = 10_000  # pieces of a stream: a client that leaves more of them unread has left
OURS = {'max_tokens': 'max_new_tokens', 'max_completion_tokens': 'max_new_tokens'}  # OpenAI's names
IGNORED = ('model', 'user', 'metadata', 'store', 'service_tier', 'parallel_tool_calls',
           'safety_identifier', 'prompt_cache_key')
ACCEPTED = {  # values of OpenAI's options; others ask for what this server does not do
    'stream_options': [{}, {'include_usage': False}, {'include_usage': True}],
    'stream': [False, True], 'n': [1], 'best_of': [1], 'presence_penalty': [0],
    'frequency_penalty': [0], 'logprobs': [False], 'top_logprobs': [0], 'logit_bias': [{}],
    'tools': [[]], 'tool_choice': ['none', 'auto'], 'functions': [[]], 'echo': [False],
    'modalities': [['text']], 'response_format': [{'type': 'text'}]}


@dataclass
class ServeConfig(GeneratorChoice):
    host: str = '127.0.0.1'  # 0.0.0.0 for other machines, with PLAINGPT_API_KEY in the environment
    port: int = 8000  # 0 for a free one

    def out_of_range(self):
        return [] if 0 <= self.port < 65536 else [f'port={self.port}: must be from 0 to 65535']


class Server:
    def __init__(self, generator, key):
        self.generator, self.key = generator, key
        # Whoever knows the key may come from anywhere: a browser does not send it by itself.
        self.allowed = re.compile('.*') if key else LOOPBACK
        self.room, self.writer = asyncio.Semaphore(1 + WAITING), ThreadPoolExecutor(1)

    def check_access(self, request):
        """Refuse web pages of others, and whoever does not know the key."""
        from starlette.exceptions import HTTPException
        host, origin = request.headers.get('host', ''), request.headers.get('origin')
        key = request.headers.get('authorization', '').removeprefix('Bearer ')
        how = 'only this machine is served: to serve others, start with a PLAINGPT_API_KEY'
        if not self.allowed.fullmatch(f'http://{host}'):
            raise HTTPException(400, f'Host {host}: {how}')
        if origin and not self.allowed.fullmatch(origin):
            raise HTTPException(403, f'Origin {origin}: {how}')
        if self.key and not secrets.compare_digest(key.encode(), self.key.encode()):
            raise HTTPException(401, 'wrong or no API key: send "Authorization: Bearer KEY"')

    async def models(self, request):
        from starlette.responses import JSONResponse
        self.check_access(request)
        model = {'id': 'plaingpt', 'object': 'model', 'created': 0, 'owned_by': 'plaingpt'}
        return JSONResponse({'object': 'list', 'data': [model]})

    async def __call__(self, scope, receive, send):
        from starlette.exceptions import HTTPException
        from starlette.requests import Request
        from starlette.responses import StreamingResponse
        request, body = Request(scope, receive), bytearray()
        async with asyncio.timeout(SECONDS):
            async for chunk in request.stream():  # to its end: before, no client reads an answer
                body += chunk if len(body) <= MAX_BYTES else b''
        self.check_access(request)
        if request.headers.get('content-type', '').split(';')[0].lower() != 'application/json':
            raise HTTPException(415, 'send the header "Content-Type: application/json"')
        if len(body) > MAX_BYTES:
            raise HTTPException(413, f'the body has more than {MAX_BYTES:,} bytes')
        completion = await asyncio.to_thread(
            Completion, copy(self.generator), 'chat' in scope['path'], body)
        if self.room.locked():
            raise HTTPException(429, 'too many requests wait: try again later')
        await self.room.acquire()
        loop = asyncio.get_running_loop()
        writing = loop.run_in_executor(self.writer, completion.write, loop, self.uvicorn)
        writing.add_done_callback(lambda _: self.room.release())
        kind = 'text/event-stream' if completion.stream else 'application/json'
        try:  # Starlette ends a stream whose client leaves. So a text in one piece streams, too.
            response = StreamingResponse(completion.respond(writing), media_type=kind)
            await response(scope, receive, send)
        finally:
            completion.generator.cancelled = True
            writing.cancel()


class Completion:
    def __init__(self, generator, is_chat, body):
        """generator: its `tokens` are those of this text; body: JSON. Raises UserError."""
        self.generator, self.is_chat, self.pieces = generator, is_chat, asyncio.Queue()
        try:
            given = json.loads(body)
            json.dumps(given, ensure_ascii=False).encode()  # fails for half a character
            given = {OURS.get(name, name): value for name, value in given.items()
                     if value is not None and name not in IGNORED}
        except (AttributeError, ValueError, RecursionError):
            raise UserError('the body must be a JSON object of Unicode text') from None
        self.stream = given.get('stream', False)
        self.include_usage = given.get('stream_options') == {'include_usage': True}
        for name in ACCEPTED.keys() & given.keys():
            if (value := given.pop(name)) not in ACCEPTED[name]:
                raise UserError(f'{name!r}={value!r:.99}: expected one of {ACCEPTED[name]}')
        self.stop = list_stops(given.pop('stop', ''))
        if sum(map(len, self.stop)) > MAX_STOP:
            raise UserError(f'stop: expected at most {MAX_STOP:,} characters')
        prompt = given.pop('messages' if is_chat else 'prompt', '')
        self.sampling = checked(Sampling, {'temperature': 1.0, 'top_k': 0,  # as OpenAI has it
                                           'seed': secrets.randbits(62), **given})
        if is_chat:
            self.ids, self.sampling = generator.prepare_answer(prompt, self.sampling)
        else:
            self.ids = generator.encode(prompt, 'prompt')

    def write(self, loop, server):
        """→ the text, which ends early where the client has left or the server ends."""
        def show(piece):
            if self.stream:
                loop.call_soon_threadsafe(self.pieces.put_nowait, piece)
            if server.should_exit or self.pieces.qsize() > UNREAD:
                self.generator.cancelled = True
        return self.generator.write([self.ids], [0], self.sampling, self.stop, show)[0]

    async def respond(self, writing):
        """Yield the body of a response while `writing`, a future of write(), is under way."""
        writing.add_done_callback(lambda _: self.pieces.put_nowait(''))
        head = {'id': secrets.token_hex(16), 'created': int(time.time()), 'model': 'plaingpt'}

        def response(text, reason=None, usage=None, **role):
            kind, said = 'text_completion', {'text': text}
            if self.is_chat:
                kind = 'chat.completion.chunk' if self.stream else 'chat.completion'
                said = {'delta' if self.stream else 'message': {**role, 'content': text}}
            choice = {'index': 0, **said, 'finish_reason': reason}
            found = json.dumps({**head, 'object': kind, 'usage': usage,
                                'choices': [] if self.stream and usage else [choice]})
            return f'data: {found}\n\n' if self.stream else found

        if self.stream:
            yield response('', role='assistant')
            while piece := await self.pieces.get():
                yield response(piece)
        text, tokens = await writing, self.generator.tokens
        if self.generator.cancelled:
            return  # without an end, which the text has not
        reason = 'length' if tokens == self.sampling.max_new_tokens else 'stop'
        usage = {'prompt_tokens': len(self.ids), 'completion_tokens': tokens,
                 'total_tokens': len(self.ids) + tokens}
        if self.stream:
            yield response('', reason)
            if self.include_usage:
                yield response('', usage=usage)
            yield 'data: [DONE]\n\n'
        else:
            yield response(text, reason, usage, role='assistant')


def problem(request, error):
    """The response to a mistake of the client."""
    from starlette.responses import JSONResponse
    message = getattr(error, 'detail', str(error)) or f'it took more than {SECONDS} s to arrive'
    body = {'message': printable(message)[:1000], 'type': 'invalid_request_error'}
    return JSONResponse({'error': body}, getattr(error, 'status_code', 400))


def main(argv):
    config = load_config(ServeConfig, argv, __doc__, positional='out_dir')
    key = os.environ.get('PLAINGPT_API_KEY', '')
    if not key and not LOOPBACK.fullmatch(f'http://{config.host}'):
        raise UserError(f'host={config.host} takes a PLAINGPT_API_KEY in the environment')
    if not re.fullmatch('[!-~]*', key):  # a header can hold it
        raise UserError('PLAINGPT_API_KEY: use ASCII letters, digits and signs, and no spaces')
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
            self.loop.call_later(SECONDS, lambda: self.cycle or transport.close())  # no request yet

    server = Server(open_generator(config), key)
    mistakes = (UserError, HTTPException, TimeoutError, ClientDisconnect, RecursionError,
                ValueError)  # of tiktoken, for a million spaces
    app = Starlette(exception_handlers=dict.fromkeys(mistakes, problem))
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
