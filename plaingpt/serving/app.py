"""HTTP: OpenAI's addresses and a page to chat on, in front of a Batch. Starlette and uvicorn."""

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import json
import re
import socket
import threading
import time
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from plaingpt.serving.batching import QueueFull
from plaingpt.serving.protocol import (
    Refused,
    chunk,
    last_chunk,
    model_entry,
    read_body,
    read_request,
    usage,
    whole,
)
from plaingpt.system.errors import UserError, needs
from plaingpt.system.formatting import one_line
from plaingpt.system.streams import warn

PAGE = Path(__file__).with_name('page.html')
# A name or an address, without or with a port.
HOST = re.compile(r'(\[[0-9a-f:.]+\]|[a-z0-9.-]+)(:\d+)?', re.ASCII | re.IGNORECASE)
HEAD_S = 20  # within which a client has to send the head of a request, and again its body
READER_S = 30  # within which it has to read 64 KB that wait for it
CONNECTIONS = 256  # at a time; more are told to try later


class Api:
    """Answers requests. The event loop's thread runs all of it but `distribute`."""

    def __init__(self, batch, limits, key, only_local):
        self.batch, self.limits, self.only_local = batch, limits, only_local
        self.key = key.encode()
        self.tokenizer = batch.tokenizer
        self.block_size = batch.model.config.block_size
        self.queues = {}  # Job → what is new of its texts
        batch.deliver = self.distribute

    def distribute(self, news):
        """What `batch` delivers, in its thread → the queues of those who asked."""
        with suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(self.put, news)

    def put(self, news):
        for text, *rest in news:
            if text.receiver in self.queues:
                self.queues[text.receiver].put_nowait((text.index, *rest))

    def check(self, request):
        """Refuse those who have no key; without one, web pages of others, whose browser would send
        a request here under another name (DNS rebinding)."""
        scheme, _, given = request.headers.get('authorization', '').partition(' ')
        given = given.strip() * (scheme.lower() == 'bearer')
        if self.key and not hmac.compare_digest(given.encode(), self.key):
            raise Refused('wrong or no API key: send it as "Authorization: Bearer KEY"',
                          status=401, code='invalid_api_key')
        # Not request.url: of a name that it cannot read, it makes the server's address.
        host = HOST.fullmatch(request.headers.get('host', ''))
        if self.only_local and not self.key and not (host and is_loopback(host[1].strip('[]'))):
            raise Refused('this server is for its own machine: call it localhost or 127.0.0.1, or '
                          'give it an --api_key', status=403)

    async def models(self, request):
        self.check(request)
        entry = model_entry(self.limits, self.tokenizer, self.block_size)
        name = request.path_params.get('name')
        if name is None:
            return respond({'object': 'list', 'data': [entry]})
        if name != self.limits.model_name:
            raise Refused(f'there is no model {name[:60]!r}', 'model', 404, 'model_not_found')
        return respond(entry)

    async def completions(self, request):
        return await self.answer(request, chat=False)

    async def chat(self, request):
        return await self.answer(request, chat=True)

    async def answer(self, request, chat):
        self.check(request)
        kind = request.headers.get('content-type', '').partition(';')[0].strip().lower()
        if kind != 'application/json':  # a form of another site's page could be text/plain
            raise Refused('send JSON, with "Content-Type: application/json"', status=415)
        body = read_body(await self.read(request))
        job = await asyncio.to_thread(read_request, body, chat, self.tokenizer, self.block_size,
                                      self.limits)
        self.queues[job] = asyncio.Queue()
        try:
            self.batch.submit(job.texts)
        except QueueFull:
            del self.queues[job]
            raise Refused('too many requests wait already: try again later', status=429,
                          code='queue_full') from None
        headers = {'x-dropped-messages': str(job.dropped)} if job.dropped else {}
        return self.stream(job, headers) if job.stream else \
            await self.collect(request, job, headers)

    async def read(self, request):
        """The body. What is too large is read to its end, so that the client reads the answer."""
        parts, size = [], 0
        try:
            async with asyncio.timeout(HEAD_S):
                async for part in request.stream():
                    size += len(part)
                    if size <= self.limits.body_bytes:
                        parts.append(part)
        except TimeoutError:
            raise Refused(f'the body did not come within {HEAD_S} s', status=408) from None
        if size > self.limits.body_bytes:
            raise Refused(f'the body has {size:,} bytes, of {self.limits.body_bytes:,} at most',
                          status=413)
        return b''.join(parts)

    async def news(self, job):
        """Yield (index, piece, reason) until all texts of a job have ended. Raises Refused."""
        running = len(job.texts)
        try:
            async with asyncio.timeout(self.limits.timeout_s):
                while running:
                    index, piece, reason, error = await self.queues[job].get()
                    if error:
                        raise Refused(error, status=500)
                    running -= reason is not None
                    yield index, piece, reason
        except TimeoutError:
            raise Refused(f'not done within {self.limits.timeout_s:g} s', status=504) from None

    def end(self, job):
        """The client has its answer, or has left."""
        self.batch.leave(job.texts)
        del self.queues[job]
        count = usage(job)
        print(f'{"chat" if job.chat else "completion"}: {count["prompt_tokens"]} + '
              f'{count["completion_tokens"]} tokens in {time.monotonic() - job.began:.1f} s')

    async def collect(self, request, job, headers):
        """All texts at once; none, where the client has left before."""
        pieces, reasons = [[] for _ in job.texts], [None for _ in job.texts]

        async def gather():
            async for index, piece, reason in self.news(job):
                pieces[index].append(piece)
                reasons[index] = reason

        async def leave():
            while (await request.receive())['type'] != 'http.disconnect':
                pass

        tasks = [asyncio.create_task(gather()), asyncio.create_task(leave())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                tasks[0].result()  # raises what it raised
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.end(job)
        return respond(whole(job, self.limits, map(''.join, pieces), reasons), headers=headers)

    def stream(self, job, headers):
        from starlette.responses import StreamingResponse

        async def events():
            begun = set()
            try:
                async for index, piece, reason in self.news(job):
                    if job.chat and index not in begun:
                        yield event(chunk(job, self.limits, index, '', None, first=True))
                    begun.add(index)
                    yield event(chunk(job, self.limits, index, piece, reason))
                if job.include_usage:
                    yield event(last_chunk(job, self.limits))
                yield 'data: [DONE]\n\n'
            except Refused as e:
                yield event(e.body)

        class Stream(StreamingResponse):
            async def __call__(response, scope, receive, send):
                try:
                    await super().__call__(scope, receive, send)
                finally:
                    self.end(job)

        return Stream(events(), headers={'cache-control': 'no-cache', **headers},
                      media_type='text/event-stream')


def event(value):
    return f'data: {json.dumps(value)}\n\n'


def respond(value, status=200, headers=None):
    """A response of JSON, in ASCII: a text may hold half a character, which UTF-8 has not."""
    from starlette.responses import Response
    return Response(json.dumps(value), status, headers, 'application/json')


def refuse(refused):
    retry = {'retry-after': '1'} if refused.status == 429 else {}
    key = {'www-authenticate': 'Bearer'} if refused.status == 401 else {}
    return respond(refused.body, refused.status, {**retry, **key})


def is_loopback(host):
    try:
        return host.lower() == 'localhost' or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_page():
    """The page → (its bytes, headers that let it run its own script only and talk to us only)."""
    page = PAGE.read_bytes()
    script, = re.findall(rb'<script>(.*?)</script>', page, re.S)
    digest = base64.b64encode(hashlib.sha256(script).digest()).decode()
    return page, {
        'content-security-policy':
            f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
            "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
            "frame-ancestors 'none'",
        'x-content-type-options': 'nosniff', 'referrer-policy': 'no-referrer',
        'cache-control': 'no-cache'}


def build_app(api):
    """The addresses, as an ASGI application that runs the thread of `api.batch`."""
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect
    from starlette.responses import Response
    from starlette.routing import Route
    page, headers = read_page()

    async def show_page(request):
        return Response(page, headers=headers, media_type='text/html')

    async def refused(request, e):
        return refuse(e)

    async def not_found(request, e):
        return refuse(Refused(f'{e.detail}: there are /v1/chat/completions, /v1/completions (POST),'
                              ' /v1/models and / (GET)', status=e.status_code))

    async def gone(request, e):
        return Response(status_code=400)  # nobody reads it

    async def failed(request, e):
        warn(f'a request failed: {type(e).__name__}: {one_line(e)}')
        return refuse(Refused('the server failed at this request', status=500))

    @asynccontextmanager
    async def lifespan(app):
        api.loop = asyncio.get_running_loop()
        thread = threading.Thread(target=api.batch.run, name='model')
        thread.start()
        yield
        api.batch.close()
        await asyncio.to_thread(thread.join)

    return Starlette(
        routes=[Route('/', show_page),
                Route('/v1/models', api.models), Route('/v1/models/{name:path}', api.models),
                Route('/v1/completions', api.completions, methods=['POST']),
                Route('/v1/chat/completions', api.chat, methods=['POST'])],
        exception_handlers={Refused: refused, HTTPException: not_found, ClientDisconnect: gone,
                            Exception: failed},
        lifespan=lifespan)


def without_the_rest(app):
    """An ASGI application whose answers close the connection where they come before all of the
    request's body, as a refusal does: nobody waits for the rest of it."""
    async def answer(scope, receive, send):
        unread = any(name in (b'content-length', b'transfer-encoding') and value != b'0'
                     for name, value in scope.get('headers', ()))

        async def read():
            nonlocal unread
            message = await receive()
            unread = unread and message.get('more_body', False)
            return message

        async def write(message):
            if unread and message['type'] == 'http.response.start':
                message = {**message, 'headers': [*message['headers'], (b'connection', b'close')]}
            await send(message)
        await app(scope, read, write)
    return answer


def patient_protocol():
    """uvicorn's HTTP/1.1, but its patience with slow clients has an end → a class."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Protocol(H11Protocol):
        """Closes connections on which the head of a request does not come in time, and those whose
        client does not read what it asked for."""

        head_timer = reader_timer = None

        def connection_made(self, transport):
            super().connection_made(transport)
            self.watch()

        def data_received(self, data):
            super().data_received(data)
            self.watch()

        def connection_lost(self, exc):
            super().connection_lost(exc)
            self.stop_watching()
            self.resume_writing()

        def pause_writing(self):
            super().pause_writing()
            self.reader_timer = self.loop.call_later(READER_S, self.transport.abort)

        def resume_writing(self):
            super().resume_writing()
            if self.reader_timer is not None:
                self.reader_timer.cancel()
                self.reader_timer = None

        def watch(self):
            if self.conn.their_state.__name__ != 'IDLE' or self.transport.is_closing():
                self.stop_watching()
            elif self.head_timer is None:
                self.head_timer = self.loop.call_later(HEAD_S, self.transport.close)

        def stop_watching(self):
            if self.head_timer is not None:
                self.head_timer.cancel()
                self.head_timer = None

        def send_400_response(self, msg):
            body = json.dumps(Refused('the request is no HTTP').body).encode()
            self.transport.write(b'HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-type: '
                                 b'application/json\r\ncontent-length: %d\r\n\r\n%s'
                                 % (len(body), body))
            self.transport.close()

    return Protocol


def run_server(app, batch, sock):
    """Answer on a bound socket until a signal comes, which is raised again at the end."""
    import uvicorn

    class Server(uvicorn.Server):
        def handle_exit(self, sig, frame):
            batch.close()  # ends the texts, and with them the connections
            super().handle_exit(sig, frame)

    config = uvicorn.Config(without_the_rest(app), http=patient_protocol(),
                            limit_concurrency=CONNECTIONS, ws='none', loop='asyncio', lifespan='on',
                            log_level='critical', access_log=False, server_header=False,
                            proxy_headers=False, timeout_graceful_shutdown=5)
    Server(config).run([sock])


def bind(host, port):
    """A socket at this address, where there are the packages to answer on it. Raises UserError."""
    with needs('starlette uvicorn', 'serve.py'):
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sock = socket.socket(family, kind)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except (OSError, UnicodeError) as e:
        why = getattr(e, 'strerror', None) or 'there is no such name'
        raise UserError(f'host={host} port={port}: {why}: name another --port or --host, '
                        'or --port=0 for a free one') from None
    return sock
