"""Answer requests over HTTP with a trained model, and show a page to chat with it.

    python serve.py --out_dir=out
    python serve.py --init_from=gpt2 --port=8080
    PLAINGPT_API_KEY=secret python serve.py --out_dir=out --host=0.0.0.0

http://127.0.0.1:8000/ is the page; /v1/chat/completions, /v1/completions and /v1/models are as
OpenAI's, for clients such as its Python package.
"""

if __name__ == '__main__':  # before torch, which takes seconds
    from plaingpt.system.errors import begin_script
    begin_script()

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from configurator import load_config
from plaingpt.inference.weight_layout import prepare_for_generation
from plaingpt.serving.app import Api, bind, build_app, is_loopback, run_server
from plaingpt.serving.batching import Batch
from plaingpt.serving.protocol import Limits
from plaingpt.system.devices import choose_device, choose_dtype, use_fast_matmul
from plaingpt.system.errors import run_script
from plaingpt.training import model_choice


@dataclass
class ServeConfig(model_choice.ModelChoice):
    # address
    host: str = '127.0.0.1'  # 0.0.0.0 for other machines, which takes an api_key
    port: Annotated[int, 'at least 0 and below 65536'] = 8000  # 0 for a free one
    api_key: str = ''  # what clients must send; better in the environment, as PLAINGPT_API_KEY
    model_name: str = ''  # how clients call the model; without it, the name of its folder
    # limits
    max_batch: Annotated[int, 'at least 1'] = 32  # texts that are written at the same time
    max_waiting: Annotated[int, 'at least 0'] = 256  # texts that wait; others are refused
    max_tokens: Annotated[int, 'at least 1'] = 4096  # most new tokens of a text
    max_body_kb: Annotated[int, 'at least 1'] = 1024  # largest request
    timeout_s: Annotated[float, 'above 0 and below 1e9'] = 300.0  # after which a request is ended
    # system
    device: str = 'auto'  # auto, cpu, cuda, cuda:0, mps
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'auto'  # precision of the matmuls

    def problems(self):
        found, key = [], self.key()
        if not (key.isascii() and key.isprintable()) or ' ' in key:
            found.append('api_key: must be ASCII without spaces')
        if not is_loopback(self.host) and not key:
            found.append(f'host={self.host} is open to other machines: give an --api_key, or '
                         'PLAINGPT_API_KEY in the environment')
        return found

    def key(self):
        return self.api_key or os.environ.get('PLAINGPT_API_KEY', '')


def name_of_model(config):
    """'out-notes' of --out_dir=out-notes, 'gpt2' of --init_from=gpt2."""
    path = config.out_dir if config.init_from == 'resume' else config.init_from
    return config.model_name or Path(path).resolve().name


def main(argv):
    config = load_config(ServeConfig, argv, __doc__)
    device, _ = choose_device(config.device)
    use_fast_matmul()
    sock = bind(config.host, config.port)  # before the model, which takes longer
    with sock:
        model, tokenizer, source, _ = model_choice.load(config.init_from, config.out_dir,
                                                       config.checkpoint, config.tokenizer)
        model = model.to(device).eval()
        dtype, _ = choose_dtype(config.dtype, device, model.config.n_embd)
        print(f'{source} | {model.num_parameters():,} parameters | device {device} | dtype {dtype}')
        context = prepare_for_generation(model, device, dtype)
        batch = Batch(model, tokenizer, context, config.max_batch, config.max_waiting)
        limits = Limits(name_of_model(config), int(time.time()), config.max_tokens,
                        config.timeout_s, config.max_body_kb * 1024)
        api = Api(batch, limits, config.key(), is_loopback(config.host))
        app = build_app(api)
        sock.listen(1000)  # from here on nobody is turned away
        host = f'[{config.host}]' if ':' in config.host else config.host
        print(f'{limits.model_name} on http://{host}:{sock.getsockname()[1]}/ (Ctrl-C ends)')
        run_server(app, batch, sock)


if __name__ == '__main__':
    run_script(main)
