"""plainGPT as a library: `plaingpt.load('out')` loads a model."""

__version__ = '1.1.0'


def load(source, checkpoint='best', tokenizer='auto', device='auto'):
    """Load a model → a TextGenerator, whose `generate(prompt)` returns text. Its `model` is a GPT
    in float32, for inspection or further training; its `tokenizer` encodes and decodes.

    source: the out_dir of a run, one of its checkpoints, a folder in the Hugging Face layout,
        nanoGPT's ckpt.pt, OWNER/NAME on the hub, or gpt2, gpt2-medium, gpt2-large or gpt2-xl
    checkpoint: which one of a run: best, latest or an iteration
    tokenizer: 'auto' for the model's own; or gpt2, byte, or the name of a prepared dataset, run or
        model that has it
    Raises UserError.
    """
    # Imported here, so that `import plaingpt` does not import torch.
    from plaingpt.inference.open_weights import ModelChoice
    from plaingpt.inference.open_weights import load as load_model
    from plaingpt.inference.text_generator import TextGenerator
    from plaingpt.system.devices import choose_device
    device, _ = choose_device(device)
    choice = ModelChoice(str(source), checkpoint=checkpoint, tokenizer=str(tokenizer))
    model, loaded_tokenizer, weights = load_model(choice)
    return TextGenerator(model.to(device), loaded_tokenizer,
                         document_start=weights.state.get('document_start'))
