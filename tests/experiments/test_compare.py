import json
import sys
import time
from types import SimpleNamespace

import own_text
import pytest
import races
import torch
from own_text import split_texts
from peer_side import bits_per_byte
from peers import Job, Peer
from processes import ROOT, options, run
from runs import TINY, lines

import evaluate
import prepare
import train
from plaingpt.inference.open_weights import ModelChoice, load


def test_a_race_parses_the_output_of_both_programs(tmp_path):
    (tmp_path / 'train.py').write_text("""print('step 100: train loss 3.6025, val loss 3.7330')
print('iter 120: loss 3.5, time 131.00ms, mfu 45.00%')
print('iter 100 | train loss 2.3725 | val loss 2.6323 ± 0.0752 | 1.672 bits/byte | best')
print('iter 120 | loss 2.1489 | lr 1.27e-03 | grad 0.42 | 140 ms | 467k tok/s')""")
    watched = races.run_and_watch(['train.py'], tmp_path)
    assert [point[1:] for point in watched.curve] == [(100, 3.7330), (100, 2.6323)]
    assert watched.step_ms == [131.0, 140.0]


def test_the_models_of_other_programs_are_scored_as_evaluate_does(trained, text_file, tmp_path):
    text = text_file.read_text(encoding='utf-8')[:1000]
    (tmp_path / 'text.txt').write_text(text, encoding='utf-8')
    evaluate.main([str(trained), '--tasks=text', f'--data={tmp_path}/text.txt', '--device=cpu',
                   f'--output={tmp_path}/scores.json'])
    scores = json.loads((tmp_path / 'scores.json').read_text())['results']['text']
    model, tokenizer, _ = load(ModelChoice(out_dir=str(trained)))
    ids = tokenizer.encode(text)
    bits = bits_per_byte(lambda idx: model.eval()(idx, idx)[0], ids,
                         len(tokenizer.decode(ids[1:]).encode()), model.config.block_size)
    assert bits == pytest.approx(scores['bits_per_byte'], rel=1e-5)


def test_a_peer_trains_in_the_given_time_with_the_best_of_three_learning_rates(
        tmp_path, monkeypatch):
    clock = [0.0]
    factors = {}  # {folder of a model: factor of its learning rate}

    def train_peer(job, out, steps, factor):
        clock[0] += 2 + 0.5 * steps
        factors[out] = factor

    monkeypatch.setattr(time, 'perf_counter', lambda: clock[0])
    peer = Peer('', 0.1, (1, 3, 10), (4, 8), lambda job: None, train_peer,
                lambda job, out: abs(factors[out] - 3))
    monkeypatch.setitem(own_text.PEERS, 'peer', peer)
    rows = list(own_text.results('peer', Job(tmp_path, SimpleNamespace(minutes=1))))
    same = {'steps': 116, 'seconds': 60}
    assert rows == [('default', {'learning_rate': '0.1', 'bits_per_byte': 2, **same}),
                    ('tuned', {'learning_rate': '0.3', 'bits_per_byte': 0, **same})]


def test_the_validation_text_does_not_depend_on_the_tokenizer(text_file, char_data, tmp_path):
    prepare.main(['text', str(text_file), '--tokenizer=bpe:300', f'--data_dir={tmp_path}/d'])
    assert split_texts(tmp_path / 'd') == split_texts(char_data)


def test_a_race_scores_a_checkpoint_as_evaluate_does(trained, char_data, tmp_path):
    evaluate.main([f'--out_dir={trained}', '--checkpoint=6', f'--output={tmp_path}/scores.json'])
    expected = json.loads((tmp_path / 'scores.json').read_text())['results']['val']['loss']
    checkpoint = trained / 'checkpoints/iter-00000006'
    assert races.score(checkpoint, str(char_data), torch.device('cpu')) == expected


@pytest.mark.slow
def test_a_race_keeps_the_checkpoint_of_each_evaluation(char_data, tmp_path):
    (tmp_path / 'train.py').write_text("""import sys, torch
for iteration in 0, 250, 500, 750:
    print(f'step {iteration}: train loss 3.6025, val loss 3.7330')
    if iteration:
        out = sys.argv[-1].removeprefix('--out_dir=')
        torch.save({'iter_num': iteration}, f'{out}/ckpt.pt')""")
    config = SimpleNamespace(nanogpt=tmp_path)
    _, checkpoints = races.train_nanogpt(config, [], tmp_path)
    saved = {iteration: torch.load(path, weights_only=True)['iter_num']
             for iteration, path in checkpoints.items()}
    assert saved == {250: 250, 500: 500, 750: 750}
    watched, checkpoints = races.train_plaingpt(
        [*TINY, '--eval_interval=1', f'--dataset={char_data}'], tmp_path / 'out')
    assert [*checkpoints] == [iteration for _, iteration, _ in watched.curve[1:]]


def test_the_recipe_of_a_gpu_quickstart_trains_small_on_a_cpu(text_file, tmp_path):
    prepare.main(['text', str(text_file), '--tokenizer=bpe:300', f'--data_dir={tmp_path}/d'])
    train.main([str(ROOT / 'config/quickstart_gpu.py'), f'--dataset={tmp_path}/d', '--device=cpu',
                *options(n_layer=2, n_head=2, n_embd=32, block_size=32, batch_size=4,
                         total_batch_size=256, max_iters=20, warmup_iters=2, eval_interval=20,
                         report=False, dtype='float32', out_dir=tmp_path / 'out')])
    first, last = (row['val_loss'] for row in lines(tmp_path / 'out', 'val_loss'))
    assert last < first - 0.3


@pytest.mark.slow
def test_the_phases_of_a_start_are_printed(char_data):
    out = run(sys.executable, ROOT / 'tools/first_step.py', *TINY, f'--dataset={char_data}')
    for phase in 'imports', 'setup', 'preflight', 'evaluate', 'end':
        assert phase in out
