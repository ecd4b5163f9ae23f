"""Answer requests over HTTP as OpenAI's API does, one after another.

    python serve.py out

/v1/chat/completions takes `messages`, and /v1/completions a `prompt`; both take stream, stop,
max_tokens, temperature, top_p, seed, and of sample.py top_k and repetition_penalty. What clients
send by themselves is ignored: model, user, stream_options. Anything else is refused.
"""

import asyncio
import json
import os
import secrets
import time
from copy import copy
from dataclasses import dataclass
from typing import Annotated

from configurator import checked, load_config
from plaingpt.data.conversations import parse_messages
from plaingpt.inference.text_generator import Sampling, list_stops
from plaingpt.system.errors import UserError, needs, run_script
from plaingpt.training.open_weights import GeneratorChoice, open_generator

LOOPBACK = 'localhost', '127.0.0.1', '::1', '[::1]'  # a web page of others has another Host
WAITING = 16  # requests that wait for the one that is answered; more are refused
OURS = {'max_tokens': 'max_new_tokens', 'max_completion_tokens': 'max_new_tokens'}  # OpenAI's names


@dataclass
class ServeConfig(GeneratorChoice):
    host: str = '127.0.0.1'  # 0.0.0.0 for other machines, with PLAINGPT_API_KEY in the environment
    port: Annotated[int, 'at least 0 and below 65536'] = 8000  # 0 for a free one


class Server:
    def __init__(self, generator):
        self.generator, self.key = generator, os.environ.get('PLAINGPT_API_KEY', '')
        self.room, self.turn = asyncio.Semaphore(1 + WAITING), asyncio.Lock()

    async def answer(self, request):
        from starlette.responses import StreamingResponse
        key = request.headers.get('authorization', '').removeprefix('Bearer ')
        if self.key and not secrets.compare_digest(key.encode(), self.key.encode()):
            return problem(401, 'wrong or no API key: send "Authorization: Bearer KEY"')
        if self.room.locked():
            return problem(429, 'too many requests wait: try again later')
        try:
            given = {OURS.get(name, name): value for name, value in (await request.json()).items()
                     if value is not None and name not in ('model', 'user', 'stream_options')}
        except (AttributeError, ValueError, RecursionError):
            return problem(400, 'the body must be a JSON object')
        chat = request.url.path == '/v1/chat/completions'
        prompt = given.pop('messages' if chat else 'prompt', '')
        stream, stop = given.pop('stream', False), list_stops(given.pop('stop', ''))
        sampling = checked(Sampling, {'temperature': 1.0, 'top_k': 0,  # as OpenAI has it
                                      'seed': secrets.randbits(62), **given})
        if chat:
            messages = parse_messages(prompt, 'messages')
            ids, sampling = self.generator.prepare_answer(messages, sampling)
        else:
            ids = self.generator.encode(prompt, 'prompt')
        # Starlette ends a stream whose client leaves. So a text in one piece streams, too.
        kind = 'text/event-stream' if stream else 'application/json'
        return StreamingResponse(self.respond(chat, stream, ids, sampling, stop), media_type=kind)

    async def respond(self, chat, stream, ids, sampling, stop):
        """Yield the body of a response: an event for each piece of the text, or all of it."""
        generator = copy(self.generator)  # its `tokens` are those of this text
        pieces, loop = asyncio.Queue(), asyncio.get_running_loop()
        head = {'id': secrets.token_hex(16), 'created': int(time.time()), 'model': 'plaingpt'}

        def response(text, reason=None, **role):
            kind, said = 'text_completion', {'text': text}
            if chat:
                kind = 'chat.completion.chunk' if stream else 'chat.completion'
                said = {'delta' if stream else 'message': {**role, 'content': text}}
            usage = {'prompt_tokens': len(ids), 'completion_tokens': generator.tokens,
                     'total_tokens': len(ids) + generator.tokens}
            return json.dumps({**head, 'object': kind, 'usage': usage, 'choices': [
                {'index': 0, **said, 'finish_reason': reason}]})

        def tell(piece):  # in the thread that writes; True ends the text
            loop.call_soon_threadsafe(pieces.put_nowait, piece)
            return writing.cancelling() or self.uvicorn.should_exit

        async with self.room, self.turn:
            writing = asyncio.create_task(asyncio.to_thread(
                generator.write, [ids], [0], sampling, stop, tell))
            writing.add_done_callback(lambda _: pieces.put_nowait(''))
            try:
                if stream:
                    yield f'data: {response("", role="assistant")}\n\n'
                    while piece := await pieces.get():
                        yield f'data: {response(piece)}\n\n'
                [text] = await writing
                if self.uvicorn.should_exit:
                    return  # without an end, which the text has not
                reason = 'length' if generator.tokens == sampling.max_new_tokens else 'stop'
                yield f'data: {response("", reason)}\n\ndata: [DONE]\n\n' if stream \
                    else response(text, reason, role='assistant')
            finally:  # the client may have left
                writing.cancel()


def problem(status, message):
    from starlette.responses import JSONResponse
    return JSONResponse({'error': {'message': message, 'type': 'invalid_request_error'}}, status)


def main(argv):
    config = load_config(ServeConfig, argv, __doc__, positional='out_dir')
    if config.host not in LOOPBACK and not os.environ.get('PLAINGPT_API_KEY'):
        raise UserError(f'host={config.host} takes a PLAINGPT_API_KEY in the environment')
    with needs('starlette uvicorn', 'serve.py'):
        import uvicorn
        from starlette.applications import Starlette
        from starlette.middleware.trustedhost import TrustedHostMiddleware
    server = Server(open_generator(config))
    app = Starlette(exception_handlers={UserError: lambda _, e: problem(400, str(e))})
    app.add_route('/v1/chat/completions', server.answer, ['POST'])
    app.add_route('/v1/completions', server.answer, ['POST'])
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=['*'] if server.key else LOOPBACK)
    server.uvicorn = uvicorn.Server(uvicorn.Config(
        app, host=config.host, port=config.port, limit_concurrency=64, timeout_graceful_shutdown=5))
    server.uvicorn.run()


if __name__ == '__main__':
    run_script(main)
