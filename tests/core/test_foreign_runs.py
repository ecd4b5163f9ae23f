"""Runs that start from pretrained models: prepare, tune, export, chat."""

import json
import random

import pytest
from foreign_models import opened, save_model, save_tokenizer
from processes import ROOT, launch, options
from runs import lines, model_of, same, weights
from sample_data import ask

import export
import plaingpt
import prepare
import train
from plaingpt.core import checkpoint as checkpoints

RECIPE = [str(ROOT / 'config/finetune_chat.py'), *options(
    init_from='base', out_dir='out', block_size=128, batch_size=8, gradient_accumulation_steps=1,
    max_iters=50, learning_rate=1e-2, dropout=0.0, eval_interval=50, log_interval=50,
    device='cpu', dtype='float32', report=False, warmup_iters=5)]


def questions(n):
    rng = random.Random(0)
    pairs = [(rng.randrange(5), rng.randrange(5)) for _ in range(n)]
    return [ask(f'What is {a} + {b}?', f'It is {a + b}.') for a, b in pairs]


def make_base(folder, kind, template=True, **sizes):
    texts = [message['content'] for messages in questions(200) for message in messages]
    save_model(folder / 'base', kind, **sizes)
    save_tokenizer(folder / 'base', kind, [*texts, 'user\n', 'assistant\n', 'system\n'],
                   template=template)


def prepare_questions(n=300):
    with open('questions.jsonl', 'w') as f:
        f.writelines(json.dumps({'messages': messages}) + '\n' for messages in questions(n))
    prepare.main(['chat', '--input=questions.jsonl', '--tokenizer=base', '--val_fraction=0.1'])


@pytest.fixture(scope='module', params=[
    'smollm2', *(pytest.param(kind, marks=pytest.mark.slow) for kind in ('llama3', 'qwen'))])
def tuned(request, tmp_path_factory):
    """A folder with a pretrained base, out, which was tuned on 300 questions, and its export."""
    folder = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        make_base(folder, request.param)
        prepare_questions()
        train.main(RECIPE)
        export.main(['--out_dir=out', '--dest=exact'])
    return folder


def test_tuning_lowers_the_validation_loss(tuned):
    losses = [row['val_loss'] for row in lines(tuned / 'out', 'val_loss')]
    assert losses[-1] < losses[0] / 4


@pytest.mark.parametrize(('a', 'b'), [(1, 2), (3, 1)])
def test_a_tuned_model_answers_in_transformers_as_here(a, b, tuned):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    theirs = AutoModelForCausalLM.from_pretrained(tuned / 'exact').eval()
    tokenizer = AutoTokenizer.from_pretrained(tuned / 'exact')
    asked = [{'role': 'user', 'content': f'What is {a} + {b}?'}]
    answers = [plaingpt.load(tuned / name, device='cpu').answer(
        asked, temperature=0, max_new_tokens=20) for name in ('out', 'exact')]
    inputs = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True,
                                           return_tensors='pt')
    written = theirs.generate(**inputs, do_sample=False, max_new_tokens=20)
    reply = written[0, inputs['input_ids'].size(1):]
    assert answers == 2 * [tokenizer.decode(reply, skip_special_tokens=True)]
    assert 'It is' in answers[0]  # Qwen's template puts an empty thought in front of it


@pytest.mark.slow
def test_each_process_reads_its_rows_of_a_pretrained_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_base(tmp_path, 'qwen')
    prepare_questions(60)
    argv = [*RECIPE, '--max_iters=1', '--learning_rate=0', '--min_lr=0', '--eval_interval=1',
            '--gradient_accumulation_steps=2', '--batch_size=2']
    launch(train.main, 2, tmp_path, *argv, '--parallel=fsdp')
    assert same(weights('out'), opened('base').parameters())


def test_a_base_without_known_control_tokens_gets_our_chat_template(tmp_path, monkeypatch):
    from transformers import AutoTokenizer
    monkeypatch.chdir(tmp_path)
    make_base(tmp_path, 'smollm2', template=False, vocab_size=400)
    path = tmp_path / 'base/tokenizer.json'
    path.write_text(path.read_text().replace('<|im_', '<|turn_'))
    prepare_questions(60)
    train.main([*RECIPE, '--max_iters=1', '--eval_interval=1'])
    assert model_of(checkpoints.find('out')).config.vocab_size == 405
    export.main(['--out_dir=out', '--dest=mine'])
    theirs, ours = AutoTokenizer.from_pretrained('mine'), plaingpt.load('mine').tokenizer
    messages = questions(1)[0]
    assert theirs.apply_chat_template(messages, return_dict=True)['input_ids'] \
        == ours.encode_conversation(messages)[0].tolist()
