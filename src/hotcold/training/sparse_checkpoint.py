"""Reads a Hugging Face checkpoint to make it sparse."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotcold.convert.checkpoint import open_checkpoint
from hotcold.convert.finding import activation, find_layout
from hotcold.convert.vocabulary import vocabulary_metadata
from hotcold.errors import UserError
from hotcold.tokenizer.tokenizer import Tokenizer
from hotcold.training.libraries import library_errors, torch, transformers
from hotcold.training.modeling_hotcold import ACTIVATION_KEYS, DENSE_KEY, NAMES, put_in_named
from hotcold.values import shown


@dataclass(frozen=True)
class Original:
    """A checkpoint folder whose model can be made sparse, before its weights are read."""

    folder: Path
    tokenizer: Tokenizer  #: as in the converted file
    config: dict[str, Any]  #: config.json
    key: str  #: of the activation in it
    context: int  #: the model's largest number of positions


def open_original(folder: Path, wanted: str = "drelu") -> Original:
    """Checks a folder whose activation becomes ``wanted``. UserError: it is no checkpoint, transformers has
    no class for it, or ``hotcold convert`` could not read the result."""
    checkpoint = open_checkpoint(folder)
    layout, facts = find_layout(checkpoint.config)
    computed, _ = activation(facts, layout)
    if "quantised" in facts:
        problem = f"{folder}: the weights are quantised by {facts.values['quantised'].name}"
        raise UserError(f"{problem}: training needs the original weights (BF16, F16 or F32)")
    config = dict(checkpoint.config.values)
    kind = shown(config["model_type"])
    if config["model_type"] not in transformers().CONFIG_MAPPING:
        problem = f"{folder}: transformers, which trains models here, has no class for model_type {kind}"
        raise UserError(f"{problem}, whose FFN computes {computed}: convert it as it is")
    if "drelu" not in layout.activations:
        problem = f"{folder}: the FFN of model_type {kind} is of an unknown form"
        raise UserError(f"{problem}: models with a gate and SiLU, GELU or ReLU can be made sparse")
    if "text_config" in config:
        problem = f"{folder}: model_type {kind} has other parts next to its text model"
        raise UserError(f"{problem}: save the text model as a checkpoint of its own")
    key = next((key for key in ACTIVATION_KEYS if key in config), "")
    if not key:
        raise UserError(f"{checkpoint.config.path} names no activation: add {' or '.join(ACTIVATION_KEYS)}")
    if wanted not in layout.activations:
        problem = f"{folder}: {key} is that of states, too, so {wanted} would change both"
        raise UserError(f"{problem}: `activation=drelu` changes only the FFN")
    tokenizer = Tokenizer.from_metadata(vocabulary_metadata(checkpoint, facts.integer("vocab_size")))
    return Original(folder, tokenizer, config, key, facts.integer("max_position_embeddings"))


def load_model(original: Original, device: Any, dtype: Any = torch.float32) -> Any:
    """The model, with the activation that ``config.json`` names, also FATReLU and dReLU. UserError:
    transformers cannot load it, or tensors are missing."""
    library = transformers()
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    stated = original.config[original.key]
    with library_errors(f"{original.folder}: transformers cannot load it"):
        config = library.AutoConfig.from_pretrained(original.folder, local_files_only=True)
        if stated in NAMES:
            setattr(config, original.key, original.config.get(DENSE_KEY, "relu"))
        model, loading = library.AutoModelForCausalLM.from_pretrained(
            original.folder, config=config, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    if missing := sorted({*loading["missing_keys"], *(key[0] for key in loading["mismatched_keys"])}):
        raise UserError(f"{original.folder} has no tensor {shown(missing[0])} of the right shape")
    put_in_named(model, stated, original.config.get("hidden_act_param"))
    return model.to(device)


def stored_type(original: Original) -> Any:
    """The type of the original's weights, which the sparse checkpoint keeps."""
    name = original.config.get("torch_dtype", original.config.get("dtype")) or "float32"
    return {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(name, torch.float32)
