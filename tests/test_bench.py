from helpers import fails

import bench


def test_memory_is_measured_beside_the_plan(capsys):
    bench.main(['--memory', '--n_layer=2', '--n_head=2', '--n_embd=64', '--block_size=64',
                '--batch_size=8', '--gradient_accumulation_steps=2', '--device=cpu',
                '--dtype=float32', '--dataset=no_such_dataset', '--vocab_size=300'])
    out = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in out.splitlines()[2:6]}
    assert list(rows) == ['forward', 'backward', 'optimizer', 'peak']
    for row in rows.values():
        measured, planned = float(row[1]), float(row[-2])
        assert row[2] == row[-1] == 'MiB' and abs(planned / measured - 1) < 0.1


def test_a_benchmark_says_what_it_can_measure(capsys, monkeypatch):
    assert '--memory' in fails(capsys, monkeypatch, bench.main)
