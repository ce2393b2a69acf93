"""Account of the keys under a file's architecture: each key is read, has no effect, or is refused.

Readers look keys up in :class:`ReadKeys`, which records their names. A key that no reader looked up is
refused if it is known to change results, and named in a note if it is unknown."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hotcold.model.families import Family
from hotcold.model.keys import ModelError
from hotcold.values import printable, shown

#: Keys for which 0 means the same as a missing key.
_UNSET_BY_ZERO = ("expert_gating_func", "_logit_softcapping")
_LISTED = 8  # names of a note

#: Keys that change results, and their values without effect. Some families implement them; a file of another
#: family with such a key is refused.
EFFECTIVE: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            "attention.clamp_kqv", "attention.indexer.top_k", "attention.kv_lora_rank",
            "attention.max_alibi_bias", "attention.output_scale", "attention.q_lora_rank",
            "attention.recurrent_layers", "attention.relative_buckets_count", "attention.scale",
            "attention.shared_kv_layers", "attention.sliding_window", "attention.temperature_scale",
            "attn_logit_softcapping", "embedding_length_out", "embedding_length_per_layer_input",
            "expert_chunk_feed_forward_length", "expert_count", "experts_per_group",
            "final_logit_softcapping", "kda.head_dim", "moe_latent_size", "rescale_every_n_layers",
            "rope.scaling.alpha", "router_logit_softcapping", "shortconv.l_cache", "ssm.state_size",
            "swiglu_clamp_exp", "swiglu_clamp_shexp", "token_shift_count", "wkv.head_size",
        ),
        (0,),
    ),
    **dict.fromkeys(
        (
            "altup.num_inputs", "embedding_scale", "expert_group_scale", "interleave_moe_layer_step",
            "logit_scale", "moe_every_n_layers", "residual_scale",
        ),
        (0, 1),
    ),
    "activation_sparsity_scale": (-np.inf,),
    "attention.causal": (True,),
    "attention.key_length_swa": (),
    "attention.value_length_swa": (),
    "rope.dimension_count_swa": (),
    "ssm.dt_b_c_rms": (False,),
}  # fmt: skip

#: Keys without effect, or only with another key, whose reader looks them up.
_OTHERS = """
    altup.active_idx attention.head_count_kv attention.indexer.head_count attention.indexer.key_length
    attention.key_length attention.key_length_mla attention.layer_norm_epsilon
    attention.layer_norm_rms_epsilon attention.sliding_window_pattern attention.temperature_length
    attention.value_length attention.value_length_mla expert_feed_forward_length expert_gating_func
    expert_group_count expert_group_used_count expert_shared_count expert_shared_feed_forward_length
    expert_used_count expert_weights_norm expert_weights_scale feed_forward_length full_attention_interval
    leading_dense_block_count n_deepstack_layers pooling_type rope.dimension_count rope.dimension_sections
    rope.freq_base rope.freq_base_swa rope.scale_linear rope.scaling.attn_factor rope.scaling.factor
    rope.scaling.finetuned rope.scaling.original_context_length rope.scaling.type
    rope.scaling.yarn_attn_factor rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow
    rope.scaling.yarn_ext_factor rope.scaling.yarn_log_multiplier ssm.conv_kernel ssm.group_count
    ssm.inner_size ssm.time_step_rank tensor_data_layout vocab_size
"""
WITHOUT_EFFECT = frozenset(_OTHERS.split())


class ReadKeys(Mapping[str, Any]):
    """A file's metadata with its family's defaults; records the keys that are looked up."""

    def __init__(self, metadata: Mapping[str, Any], family: Family) -> None:
        self._metadata = metadata
        self._implied = {f"{family.name}.{key}": value for key, value in family.implied.items()}
        self.names: set[str] = set()  #: keys that were looked up

    def __getitem__(self, key: str) -> Any:
        self.names.add(key)
        value = self._metadata.get(key)
        unset = value is None or (key.endswith(_UNSET_BY_ZERO) and np.array_equal(value, 0))
        return self._implied[key] if unset and key in self._implied else self._metadata[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._metadata)

    def __len__(self) -> int:
        return len(self._metadata)

    def account(self, architecture: str) -> tuple[str, ...]:
        """Returns a note on unknown keys under the architecture's name, if any. ModelError: a key that
        changes results was not read."""
        prefix = f"{architecture}."
        unread = [key for key in self._metadata if key.startswith(prefix) and key not in self.names]
        unknown = []
        for name in unread:
            key, value = name.removeprefix(prefix), self._metadata[name]
            if key not in EFFECTIVE:
                unknown += [] if key in WITHOUT_EFFECT else [printable(name, 80)]
            elif not np.isin(value, EFFECTIVE[key]).all():
                got = f"{name} is {shown(value)}"
                raise ModelError(f"{got}: this is not supported yet in files of {architecture}")
        if not unknown:
            return ()
        listed = ", ".join(unknown[:_LISTED]) + ", ..." * (len(unknown) > _LISTED)
        return (
            f"the file has keys that are not read: {listed}; if the model computes with them, results differ",
        )
