"""Answer requests over HTTP, one at a time, and show a page to chat with the model.

    python serve.py out
    python serve.py --init_from=gpt2 --port=8080
    PLAINGPT_API_KEY=secret python serve.py out --host=0.0.0.0

http://127.0.0.1:8000/ is the page; /v1/chat/completions, /v1/completions and /v1/models are as
OpenAI's, for clients such as its Python package.
"""

if __name__ == '__main__':  # before torch, which takes seconds
    from plaingpt.system.errors import begin_script
    begin_script()

import asyncio
import json
import os
import secrets
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

from configurator import load_config
from plaingpt.data.chat_tokenizer import is_chat
from plaingpt.inference.openai_api import Refused, error, events, read_job, response
from plaingpt.inference.text_generator import TextGenerator
from plaingpt.inference.weight_layout import prepare_for_generation
from plaingpt.system.devices import choose_device, choose_dtype, use_fast_matmul
from plaingpt.system.errors import UserError, needs, run_script
from plaingpt.training import model_choice

LOOPBACK = ('localhost', '127.0.0.1', '::1', '[::1]')
BODY_BYTES = 2**20  # of a request at most
CONNECTIONS = 100  # at a time; uvicorn answers others with 503
CLIENT_S = 20  # a client that is waited for longer is cut off, at the latest after twice as long


@dataclass
class ServeConfig(model_choice.ModelChoice):
    # address
    host: str = '127.0.0.1'  # 0.0.0.0 for other machines, which takes an api_key
    port: Annotated[int, 'at least 0 and below 65536'] = 8000  # 0 for a free one
    api_key: str = ''  # what clients must send; better in the environment, as PLAINGPT_API_KEY
    model_name: str = ''  # how clients call the model; without it, the name of its folder
    # limits
    max_waiting: Annotated[int, 'at least 0'] = 16  # requests that wait; others are refused
    max_tokens: Annotated[int, 'at least 1'] = 4096  # most new tokens of a text
    # system
    device: str = 'auto'  # auto, cpu, cuda, cuda:0, mps
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'auto'  # precision of the matmuls

    def problems(self):
        found = [] if self.key().isascii() else ['api_key: must be ASCII']
        if self.host not in LOOPBACK and not self.key():
            found.append(f'host={self.host} is open to other machines: give an --api_key, or '
                         'PLAINGPT_API_KEY in the environment')
        return found

    def key(self):
        return self.api_key or os.environ.get('PLAINGPT_API_KEY', '')


class Api:
    """Requests → responses. The event loop runs all of it but `write`."""

    def __init__(self, generator, config, parameters):
        self.generator, self.config, self.parameters = generator, config, parameters
        self.created = int(time.time())
        self.thread = ThreadPoolExecutor(1)  # it runs `write`: one text at a time, in order
        self.futures = []  # of texts that are written or wait
        self.server = None  # uvicorn's

    async def models(self, request):
        self.check_key(request)
        return respond(200, {'object': 'list', 'data': [{
            'id': self.config.model_name, 'object': 'model', 'created': self.created,
            'owned_by': 'plaingpt', 'chat': is_chat(self.generator.tokenizer),
            'parameters': self.parameters,
            'context_length': self.generator.model.config.block_size}]})

    async def answer(self, request):
        """/v1/chat/completions and /v1/completions"""
        from starlette.background import BackgroundTask
        from starlette.responses import StreamingResponse
        self.check_key(request)
        body, chat = await read_json(request), 'chat' in request.url.path
        job = await asyncio.to_thread(read_job, body, chat, self.generator, self.config.model_name,
                                      self.config.max_tokens)
        self.enqueue(job)
        headers = {'x-unseen': str(job.unseen)}
        if job.stream:  # also where the client leaves, Starlette calls `leave` at the end
            return StreamingResponse(events(job), 200, headers, 'text/event-stream',
                                     BackgroundTask(job.leave))
        while not (await asyncio.wait([job.future], timeout=0.5))[0]:
            if await request.is_disconnected():
                job.leave()
                return respond(400, None)  # nobody reads it
        return respond(200, response(job, *job.future.result()), headers)

    def check_key(self, request):
        key = self.config.key()
        scheme, _, given = request.headers.get('authorization', '').partition(' ')
        if key and not (scheme.lower() == 'bearer'
                        and secrets.compare_digest(given.strip().encode(), key.encode())):
            raise Refused(401, 'invalid_api_key',
                          'wrong or no API key: send it as "Authorization: Bearer KEY"')

    def enqueue(self, job):
        """Let the thread write a job after earlier ones. Raises Refused where too many wait."""
        self.futures = [future for future in self.futures if not future.done()]
        if len(self.futures) > self.config.max_waiting:
            raise Refused(429, 'queue_full', 'too many requests wait already: try again later')
        loop = asyncio.get_running_loop()
        job.future = loop.run_in_executor(
            self.thread, self.write, job,
            lambda piece: loop.call_soon_threadsafe(job.pieces.put_nowait, piece))
        self.futures.append(job.future)

    def write(self, job, tell):
        """In the thread: write the text of a job → (text, finish_reason, number of tokens)."""
        def check():  # at each token
            if job.left or self.server.should_exit:
                raise Refused(503, None, 'the server stops')

        began, before = time.monotonic(), self.generator.tokens
        try:
            check()
            [text] = self.generator.write([job.ids], [0], job.sampling, job.stop, tell, check)
            n_tokens = self.generator.tokens - before
            return text, 'length' if n_tokens == job.sampling.max_new_tokens else 'stop', n_tokens
        finally:
            tell(None)
            print(f'{"chat" if job.chat else "completion"}: {len(job.ids)} + '
                  f'{self.generator.tokens - before} tokens in {time.monotonic() - began:.1f} s')


async def read_json(request):
    """The body of a request → its value. Raises UserError."""
    # A form on a page of another site is sent as text/plain.
    if request.headers.get('content-type', '').partition(';')[0].strip() != 'application/json':
        raise Refused(415, None, 'send JSON, with "Content-Type: application/json"')
    data = b''
    async for part in request.stream():
        if len(data) <= BODY_BYTES:  # more is read and forgotten: then the client reads the answer
            data += part
    if len(data) > BODY_BYTES:
        raise Refused(413, None, f'the body may have {BODY_BYTES:,} bytes at most')
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as e:
        raise UserError(f'the body is no JSON: {e}') from None


def respond(status, value, headers=None):
    """A response of JSON, in ASCII: a text may hold half a character, which UTF-8 has not."""
    from starlette.responses import Response
    return Response(json.dumps(value), status, headers, 'application/json')


def build_app(api):
    """The addresses, as an ASGI application."""
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import ClientDisconnect
    from starlette.responses import HTMLResponse
    from starlette.routing import Route
    page = files('plaingpt.inference').joinpath('page.html').read_bytes()
    # Pages of others reach a server on loopback under another name (DNS rebinding).
    names = ['*'] if api.config.key() else LOOPBACK

    async def refuse(request, e):
        return respond(*error(e))

    async def gone(request, e):
        return respond(400, None)  # nobody reads it

    return Starlette(
        routes=[Route('/', HTMLResponse(page, headers={'cache-control': 'no-cache'})),
                Route('/v1/models', api.models),
                Route('/v1/chat/completions', api.answer, methods=['POST']),
                Route('/v1/completions', api.answer, methods=['POST'])],
        middleware=[Middleware(TrustedHostMiddleware, names, www_redirect=False)],
        exception_handlers={UserError: refuse, HTTPException: refuse, Exception: refuse,
                            ClientDisconnect: gone})


async def cut_off_stuck_clients(server):
    """Close connections that have waited for their client all of CLIENT_S: for a request, for the
    rest of its body, or for the client to read the answer. uvicorn has no limit for these."""
    waited = set()
    while True:
        await asyncio.sleep(CLIENT_S)
        waiting = {(each, each.cycle) for each in server.server_state.connections
                   if each.cycle is None or each.cycle.response_complete or each.cycle.more_body
                   or each.flow.write_paused}
        for connection, _ in waiting & waited:
            connection.transport.abort()
        waited = waiting


async def run_server(api, sock):
    """Answer on a bound socket until a signal comes, which is raised again at the end."""
    import uvicorn
    api.server = uvicorn.Server(uvicorn.Config(
        build_app(api), http='h11', ws='none', lifespan='off', log_level='critical',
        access_log=False, server_header=False, proxy_headers=False,
        limit_concurrency=CONNECTIONS, timeout_graceful_shutdown=5))
    watch = asyncio.create_task(cut_off_stuck_clients(api.server))
    await api.server.serve([sock])
    watch.cancel()


def bind(host, port):
    """A socket that listens at this address. Raises UserError."""
    with needs('starlette uvicorn', 'serve.py'):
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    try:
        family = socket.AF_INET6 if ':' in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except (OSError, UnicodeError) as e:
        raise UserError(f'host={host} port={port}: {getattr(e, "strerror", e)}: name another '
                        '--port or --host, or --port=0 for a free one') from None


def main(argv):
    config = load_config(ServeConfig, argv, __doc__, positional='out_dir')
    path = config.out_dir if config.init_from == 'resume' else config.init_from
    config.model_name = config.model_name or Path(path).resolve().name
    device, _ = choose_device(config.device)
    use_fast_matmul()
    with bind(config.host, config.port) as sock:  # before the model, which takes longer
        model, tokenizer, source, _ = model_choice.load(config.init_from, config.out_dir,
                                                       config.checkpoint, config.tokenizer)
        model = model.to(device).eval()
        dtype, _ = choose_dtype(config.dtype, device, model.config.n_embd)
        parameters = model.num_parameters()
        print(f'{source} | {parameters:,} parameters | device {device} | dtype {dtype}')
        context = prepare_for_generation(model, device, dtype)
        host = f'[{config.host}]' if ':' in config.host else config.host
        print(f'{config.model_name} on http://{host}:{sock.getsockname()[1]}/ (Ctrl-C ends)')
        generator = TextGenerator(model, tokenizer, context)
        asyncio.run(run_server(Api(generator, config, parameters), sock))


if __name__ == '__main__':
    run_script(main)
