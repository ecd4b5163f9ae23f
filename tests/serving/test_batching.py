import gc
import threading
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from helpers import wait_until

from model import GPT, GPTConfig
from plaingpt.inference.generation import LayerCache, generate
from plaingpt.serving.batching import Batch, QueueFull, SideBySideLayer, Text
from plaingpt.tokens.tokenizers import ByteTokenizer

FLAGS = [
    {},
    dict(rotary=True, rmsnorm=True, mlp='swiglu', qk_norm=True, conv=4, value_embeddings=True),
    dict(document_attention=True, document_start=256, conv=3),
    dict(document_attention=True, document_start=256, rotary=True)]
PROMPTS = [[256 if j % 9 == 5 else (7 * i + j * j) % 256 for j in range(3 + 5 * i)]
           for i in range(5)]
LIKELIEST = (('temperature', 0.0),)


def shaken(**flags):
    """A model in which every parameter matters."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(16, 257, 2, 2, 32, **flags)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    return model


@contextmanager
def working(model, **options):
    """A batch at work, and the list that all it delivers goes to."""
    batch, news = Batch(model, ByteTokenizer(), nullcontext(), **options), []
    batch.deliver = news.extend
    thread = threading.Thread(target=batch.run)
    thread.start()
    try:
        yield batch, news
    finally:
        batch.close()
        thread.join()


def written(model, texts, **options):
    """Let them be written at once → the new ids of each."""
    with working(model, **options) as (batch, news):
        batch.submit(texts)
        wait_until(lambda: sum(bool(reason) for _, _, reason, _ in news) == len(texts))
    return [text.ids[len(text.prompt):] for text in texts]


@pytest.mark.parametrize('flags', FLAGS, ids=lambda flags: '-'.join(flags) or 'plain')
@pytest.mark.parametrize('attention', ['ours', 'of your own'])
def test_texts_that_join_and_leave_are_those_of_generate(flags, attention, monkeypatch):
    if attention == 'of your own':  # which takes keys and values from cache.extend
        def attend(self, q, k, v, dropout):
            k, v, mask = self.extend(k, v)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

        monkeypatch.setattr(SideBySideLayer, 'attention', attend)
    model = shaken(**flags)
    lengths = [22 if i % 3 else 5 for i in range(len(PROMPTS))]  # some outgrow the context
    texts = [Text(prompt, n, LIKELIEST) for prompt, n in zip(PROMPTS, lengths, strict=True)]
    found = written(model, texts, max_texts=3)
    assert found == [generate(model, [prompt], n, temperature=0.0)[0]
                     for prompt, n in zip(PROMPTS, lengths, strict=True)]


def test_each_text_is_drawn_by_its_own_options():
    model = shaken()
    options = [dict(temperature=0.0), dict(temperature=1.0), dict(temperature=0.5, top_p=0.5),
               dict(temperature=1.0, top_k=3), dict(temperature=2.0, min_p=0.2)]

    def generator(seed):
        return torch.Generator().manual_seed(seed)

    texts = [Text(PROMPTS[1], 20, tuple(sorted(each.items())), generator(i))
             for i, each in enumerate(options)]
    assert written(model, texts) == [
        generate(model, [PROMPTS[1]], 20, generators=[generator(i)], **each)[0]
        for i, each in enumerate(options)]


def test_a_text_that_nobody_waits_for_leaves_and_another_takes_its_place():
    with working(shaken(), max_texts=1, max_waiting=1) as (batch, news):
        gone, waits = Text(PROMPTS[0], 10**9), Text(PROMPTS[0], 10**9)
        batch.submit([gone])
        batch.submit([waits])
        with pytest.raises(QueueFull):
            batch.submit([Text(PROMPTS[0], 1)])
        wait_until(lambda: batch.running)
        batch.leave([gone, waits])
        wait_until(lambda: not batch.running)
        last = Text(PROMPTS[0], 1)
        batch.submit([last])
        wait_until(lambda: any(text is last and reason for text, _, reason, _ in news))


def test_the_memory_of_a_text_is_free_when_it_ends():
    gc.collect()
    gc.disable()
    try:
        written(shaken(), [Text(PROMPTS[0], 20, LIKELIEST)])  # it reads its context anew, too
        assert not [x for x in gc.get_objects() if type(x) is LayerCache and x.keys is not None]
    finally:
        gc.enable()


def test_more_texts_than_may_wait_are_refused_as_a_whole():
    batch = Batch(shaken(), ByteTokenizer(), nullcontext(), max_texts=2, max_waiting=3)
    with pytest.raises(QueueFull):
        batch.submit([Text(PROMPTS[0], 1) for _ in range(6)])
    batch.submit([Text(PROMPTS[0], 1) for _ in range(5)])
    assert len(batch.waiting) == 5
