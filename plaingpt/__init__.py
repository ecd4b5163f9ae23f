"""plainGPT in Python: `plaingpt.load('out')` opens a model of any kind."""

__version__ = '1.0.0'


def load(source, checkpoint='best', tokenizer='auto', device='auto'):
    """Open a model → a TextGenerator, whose `generate(prompt)` writes text. Its `model` is a GPT
    like any other, in float32, to look into or to train on; its `tokenizer` encodes and decodes.

    source: the out_dir of a run, the folder of one of its checkpoints, a folder of transformers,
    nanoGPT's ckpt.pt, or gpt2, gpt2-medium, gpt2-large, gpt2-xl, which are downloaded once
    checkpoint: of a run: best, latest or an iteration
    tokenizer: 'auto' for the model's own, or gpt2, byte, a prepared dataset, a run or a model whose
        to take
    Raises UserError.
    """
    # Imported here, so that `import plaingpt` does not wait for torch.
    from plaingpt.inference.text_generator import TextGenerator
    from plaingpt.system.devices import choose_device
    from plaingpt.training.open_weights import ModelChoice
    from plaingpt.training.open_weights import load as load_model
    device, _ = choose_device(device)
    choice = ModelChoice(str(source), checkpoint=checkpoint, tokenizer=str(tokenizer))
    model, its_tokenizer, _ = load_model(choice)
    return TextGenerator(model.to(device), its_tokenizer)
