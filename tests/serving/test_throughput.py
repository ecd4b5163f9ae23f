import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from chat_model import save
from helpers import wait_until
from serving_process import serving

from model import GPT, GPTConfig
from plaingpt.data.tokenizers import ByteTokenizer

TOKENS = 64  # of a text


def tokens_a_second(server, clients, seconds):
    """Clients that ask again and again → how fast they are answered together."""
    def ask(i):
        count = 0
        while time.monotonic() < end:
            status, answer, _ = server.complete(f'client {i}', max_tokens=TOKENS, seed=count,
                                                model='large')
            assert status == 200, answer
            count += answer['usage']['completion_tokens']
        return count

    began = time.monotonic()
    end = began + seconds
    with ThreadPoolExecutor(clients) as pool:
        count = sum(pool.map(ask, range(clients)))
    return count / (time.monotonic() - began)


@pytest.mark.slow
def test_32_clients_at_once_get_more_than_one_alone_and_leave_nothing_behind(tmp_path, capsys):
    torch.manual_seed(0)
    model = GPT(GPTConfig(256, ByteTokenizer.vocab_size, 6, 6, 384))
    out_dir = save(model, ByteTokenizer(), tmp_path / 'large')
    with serving(tmp_path, out_dir) as server:
        files = server.files()
        tokens_a_second(server, 1, 2)
        alone = tokens_a_second(server, 1, 5)
        tokens_a_second(server, 32, 5)
        memory = server.memory()
        together = tokens_a_second(server, 32, 30)
        wait_until(lambda: server.files() <= files + 3)  # the event loop has a few of its own
        # Each of some hundred texts has a cache of 1.3 MB: kept ones would take more than this.
        assert server.memory() < memory + 150e6
        assert server.stop() == 130
    with capsys.disabled():
        print(f'\n32 clients: {together:,.0f} tokens/s, one: {alone:,.0f}, '
              f'{together / alone:.1f} times as many')
    assert together > alone
