"""Settings and options of earlier versions, and what to use now."""

from plaingpt.system.errors import UserError

# Removed settings that change what a model computes → the value that is computed with now, or the
# setting that has it.
COMPUTED = {
    'rotary_share': 1.0, 'embedding_norm': False, 'qk_scale': 0.0, 'head_bias': False,
    'logit_softcap': 0.0, 'softcap': 'tanh', 'adam_eps': 1e-8, 'muon_scale': 'match_rms_adamw',
    'muon_iterations': 'quintic', 'embedding_decay': 'weight_decay', 'vector_decay': 0.0}

NO_LAW = 'python plan.py CONFIG says what a run of any config takes'
JUDGE = 'bench.py --judge --against=COMMIT compares the code as it is here with a commit'

REMOVED = {
    # training
    'embedding_lr_scale': 'lr_scales=embedding:NUMBER',
    'head_lr_scale': 'lr_scales=head:NUMBER',
    'vector_lr_scale': 'lr_scales=vector:NUMBER',
    'wsd_decay': 'lr_schedule=wsd:0.2 falls in the last fifth',
    'eval_tokens': 'eval_iters says how many batches an evaluation reads',
    'overfit_batches': '--check=overfit trains on the first batch alone',
    'eval_tasks_interval': 'eval_tasks run at evaluations, every eval_interval iterations',
    'document_start': 'it is the token that opens the documents of the dataset: leave it out',
    'data_in_ram': 'tokens are read from their files: leave it out',
    'checkpoint_async': 'on CUDA a checkpoint is written while training goes on: leave it out',
    'keep_checkpoints': 'the two newest checkpoints are kept, and the best: leave it out',
    'loss_chunk_tokens': 'the loss is always computed in chunks: leave it out',
    'health_interval': 'health is measured every 100 iterations, or five times: leave it out',
    'sample_interval': 'evaluations write samples, and report.md shows them: leave it out',
    'sample_start': 'a sample continues an empty line; sample.py has --start',
    'sample_tokens': 'a sample has 100 tokens; with --report=False there is none',
    'also_evaluate': 'python evaluate.py OUT_DIR --dataset=NAME scores another dataset',
    'checkpoint_chunk_mb': 'no file of a checkpoint is larger than 512 MB',
    'deterministic': 'import torch; torch.use_deterministic_algorithms(True), in a config file',
    'dist_timeout_s': 'it is TIMEOUT in plaingpt/system/distributed.py, ten minutes',
    'fsdp_group': 'with --parallel=fsdp all processes share one copy of the model',
    'max_bad_steps': 'a run ends after ten steps in a row that are not finite',
    # the model and its optimizer
    **dict.fromkeys(COMPUTED, 'this version has no such setting: leave it out'),
    # plan.py, bench.py, plot.py
    **dict.fromkeys(('law', 'hours', 'price', 'gpu_hour_price'), NO_LAW),
    'gpu': 'plan.py takes --gpu_memory_gb',
    'tokens_per_s': 'plan.py measures a step on this machine',
    'utilisation': 'plan.py measures a step on this machine',
    'json': 'plan.py prints text, and bench.py --save=FOLDER writes a CSV',
    'memory': 'python plan.py CONFIG says what memory a step takes, by stage and owner',
    'ledger': 'give bench.py --judge --save=FOLDER',
    'pairs': 'bench.py --judge trains --seeds=N runs of each side',
    'equal': 'bench.py --judge says what a step takes',
    **dict.fromkeys(('patch', 'change', 'set', 'least'), JUDGE),
    'profile': 'torch.profiler.profile() around a step shows where its time goes',
    'real_data': 'bench.py times a step on random tokens',
    'warmup_steps': 'three steps are not counted',
    'target_loss': 'the table of bench.py has final losses, and plot.py FOLDER… the curves',
    'reference': 'plot.py finds the reference of a run by its settings and text',
    'live': 'run plot.py again, or train with --log_to=tensorboard',
    'every': 'run plot.py again, or train with --log_to=tensorboard',
    # sample.py, serve.py, evaluate.py, export.py
    'sources': 'python prepare.py inspect says how much validation text is in the training text',
    'prompts': 'plaingpt.load(OUT_DIR).generate(TEXTS) continues a list of texts',
    'min_p': 'top_p and top_k leave out tokens that are not likely',
    'end_of_text': 'a text always ends where the model ends a document',
    'template': 'a model that was tuned on conversations brings the form of them',
    'api_key': 'put it into the environment as PLAINGPT_API_KEY',
    'model_name': 'serve.py answers whatever model a request names',
    'max_waiting': 'serve.py lets 16 requests wait',
    'max_tokens': 'a request to serve.py says its own, and sample.py has max_new_tokens',
    'split': 'evaluate.py takes it as a task: --tasks=train',
    'include_path': 'name the .yaml file of a task of your own: --tasks=mine.yaml',
    'num_fewshot': 'lm_eval itself takes it, on a folder that export.py wrote',
    'lm_eval': 'name its tasks with --tasks=TASK',
    'license': 'write it at the head of README.md in the exported folder',
    'datasets': 'write them at the head of README.md in the exported folder',
    # prepare.py
    'format': 'the fields of a row tell its form; --prompt and --completion name its columns',
    'max_shards': 'hf download --include=PATTERN fetches some files of a repository',
    'dedup': 'leave out copies before: sort -u for lines, polars or datatrove for rows',
    'path': '--input names it',
    'errors': '--encoding says what the bytes of a text are; iconv -c drops those that are none',
    'test_split': 'prepare it as a dataset of its own, with --split, for evaluate.py --dataset',
    'test_fraction': 'keep text to test on in a file, for evaluate.py --tasks=text --data=FILE',
    'html': 'make text of HTML pages with trafilatura or pandoc, and prepare that',
}


def refuse_others(settings, source, unknown=False):
    """Raise UserError where settings of a checkpoint ask for what this version does not compute.
    unknown: whether a name that never was a setting is such a one"""
    for name, value in settings.items():
        if name in COMPUTED:
            other = value not in (COMPUTED[name], settings.get(COMPUTED[name]))
        else:
            other = unknown and name not in REMOVED
        if other:
            raise UserError(f'{source} is from another version of plainGPT: it has {name}={value}, '
                            'which this one does not know')


def as_today(settings):
    """{name: value} of a run of an earlier version, in the settings of this one."""
    found = {name: value for name, value in settings.items() if name not in REMOVED}
    scales = {kind: str(settings[f'{kind}_lr_scale']).removesuffix('.0')
              for kind in ('embedding', 'head', 'vector') if f'{kind}_lr_scale' in settings}
    if scales:
        found['lr_scales'] = ','.join(f'{kind}:{x}' for kind, x in scales.items() if x != '1')
    if settings.get('lr_schedule') == 'wsd' and settings.get('wsd_decay', 0.2) != 0.2:
        found['lr_schedule'] = f'wsd:{settings["wsd_decay"]}'
    if settings.get('eval_tokens'):
        tokens = settings['batch_size'] * settings['block_size']
        found['eval_iters'] = max(1, settings['eval_tokens'] // tokens)
    if settings.get('overfit_batches'):
        found['check'] = 'overfit'
    if settings.get('eval_tasks_interval') == 0:  # tasks that it named never ran
        found['eval_tasks'] = ''
    return found
