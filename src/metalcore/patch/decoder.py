# SPDX-License-Identifier: MIT
"""`metalcore.decoder(model)`: the steps of `generate()` as a recorded tape."""

import functools
import threading
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from metalcore._accuracy import error
from metalcore._check import expect
from metalcore.ops.decode.decode_step import decode_step
from metalcore.patch.decode_cache import DecoderCache, Store
from metalcore.patch.decode_parts import NotRecorded
from metalcore.patch.decode_record import Recording, record
from metalcore.patch.decode_rows import Rows
from metalcore.patch.swap import Origin, Swapped, restore, swap

# up to so many tokens of all sequences together are a step; more are a prompt
_FEW_TOKENS = 8
# how far a tape may be off the model, whose own results are rounded so
_ALLOWED = {torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}
_PROMPT, _STEPS = 8, 4
# a window that is proved by running past it
_LONGEST_WINDOW = 1 << 15
_NAME = "_metalcore_decoder"
# arguments of a step, others that do not change its result, and what only the model can give
_TAKEN = {"input_ids", "past_key_values", "attention_mask", "position_ids", "logits_to_keep"}
_IGNORED = {
    *("use_cache", "return_dict", "cache_position"),
    *("next_sequence_length", "is_first_iteration"),
}
_MORE = ("output_attentions", "output_hidden_states")


class Decoding(Swapped):
    """A model whose steps are a tape where its decoder has one."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        origin: Origin = cls.origin
        original: Any = origin.base.forward

        @functools.wraps(original)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            decoder: Decoder | None = vars(self).get(_NAME)
            if decoder is not None and not args and not torch.compiler.is_compiling():
                found = decoder.answer(kwargs)
                if found is not None:
                    return found
            return original(self, *args, **kwargs)

        cls.forward = forward  # type: ignore[attr-defined]

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        decoder: Decoder | None = vars(self).get(_NAME)
        if decoder is not None and decoder.fills_in and decoder.may_fill_in(kwargs):
            kwargs["past_key_values"] = decoder.cache()
        return super().generate(*args, **kwargs)  # type: ignore[misc]


class Decoder:
    """The steps of a model's generation as a tape; see `metalcore.decoder`."""

    def __init__(self, model: Any, dtype: torch.dtype | None, fills_in: bool) -> None:
        self.model = model
        self.fills_in = fills_in
        self.why_not = ""
        self._dtype = dtype
        self._recording: Recording | None = None
        self._tensors: list[Tensor] = []
        self._positions = 0
        self._signature: Any = None
        self._is_hooked = False
        self._lock = threading.Lock()
        self.refresh()

    @property
    def is_recorded(self) -> bool:
        """Whether there is a tape; `why_not` says why there is none."""
        return self._recording is not None

    @property
    def tape(self) -> str:
        """The text of the tape, a line for each node."""
        return "" if self._recording is None else self._recording.text

    def __repr__(self) -> str:
        name = type(self.model).__name__
        if self._recording is None:
            return f"Decoder of {name}: computed by transformers, because {self.why_not}"
        nodes = len(self.tape.split("\n")) - 1
        return f"Decoder of {name}: a tape of {nodes} nodes"

    def refresh(self) -> None:
        """Record again if a weight or a layer has changed; prompts do so by themselves."""
        with self._lock:
            found = _signature(self.model)
            if found == self._signature:
                return
            self._signature, self._recording, self.why_not = found, None, ""
            try:
                self._recording = record(self.model)
                self._tensors = list(self._recording.tensors)
                self._positions = 0
                self._prove()
            except NotRecorded as reason:
                self._recording, self.why_not = None, str(reason)

    # --- what users call

    def cache(self) -> Any:
        """A new cache for `generate(..., past_key_values=...)`; transformers' own where there is no
        tape."""
        store = self.make_store()
        if store is None:
            from transformers import DynamicCache

            return DynamicCache(config=self.model.config.get_text_config(decoder=True))
        return DecoderCache(store)

    def rows(self, capacity: int, tokens: int = 256) -> Rows:
        """Sequences that come and go, each with a length of its own: see `Rows`.

        Args:
            capacity: how many there may be at once.
            tokens: room that is made at first for so many tokens of each; it grows.
        """
        return Rows(self, capacity, tokens)

    def __enter__(self) -> "Decoder":
        expect(_NAME not in vars(self.model), "decoder", "the model has a decoder already")
        vars(self.model)[_NAME] = self
        swap(self.model, Decoding, None)
        self._is_hooked = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.undo()

    def undo(self) -> None:
        """Give the model its own forward again; a second call does nothing."""
        if self._is_hooked:
            self._is_hooked = False
            vars(self.model).pop(_NAME, None)
            restore(self.model)

    # --- what the hook and rows call

    def make_store(self) -> Store | None:
        found = self._recording
        return None if found is None else found.store(self._dtype)

    def may_fill_in(self, given: dict[str, Any]) -> bool:
        """Whether `generate` was left to choose a cache."""
        config = given.get("generation_config") or self.model.generation_config
        chosen = given.get("cache_implementation") or config.cache_implementation
        use = given.get("use_cache", config.use_cache)
        return (
            self.is_recorded
            and given.get("past_key_values") is None
            and not chosen
            and use is not False
        )

    def forward(self, tokens: Tensor, cache: Any) -> Tensor:
        """The logits after the last of the tokens [1, n], by the model; float32 [1, vocabulary]."""
        if cache.get_seq_length() == 0:
            self.refresh()
        with torch.no_grad():
            out = _plain_forward(self.model)(
                input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1
            )
        logits: Tensor = out.logits[:, -1].float()
        return logits

    def step(
        self,
        store: Store,
        tokens: Tensor,
        rows: Tensor,
        slots: Tensor,
        starts: Tensor | None = None,
    ) -> Tensor:
        """One step of the tape, [M, vocabulary]."""
        recording = self._recording
        assert recording is not None
        if store.slots > self._positions:
            self._make_tables(store.slots)
        starts = torch.zeros_like(slots) if starts is None else starts
        places = (rows, slots, starts, store.scales)
        return decode_step(recording.text, self._tensors, store.values, tokens, *places)

    def _make_tables(self, positions: int) -> None:
        recording = self._recording
        assert recording is not None
        with torch.no_grad(), torch.inference_mode(False):
            for rope in recording.ropes:
                self._tensors[rope.slot] = rope.table(positions, recording.like)
        self._positions = positions

    def answer(self, given: dict[str, Any]) -> Any:
        """What the model's forward would return, or None where it is to do so itself."""
        cache, ids = given.get("past_key_values"), given.get("input_ids")
        if not isinstance(cache, DecoderCache) or not isinstance(ids, Tensor):
            return None
        if cache.length == 0:
            self.refresh()
            return None
        if not self.is_recorded or not self._is_a_step(cache, ids, given):
            return None
        starts = _starts(cache, ids, given)
        if starts is None:
            return None
        entries, new = ids.shape
        cache.reserve(entries, cache.length + new)
        rows, slots = torch.arange(entries), torch.full((entries,), cache.length)
        if new > 1:
            rows, starts = rows.repeat_interleave(new), starts.repeat_interleave(new)
            slots = slots.repeat_interleave(new) + torch.arange(new).repeat(entries)
        logits = self.step(cache.store, ids.reshape(-1), rows, slots, starts)
        cache.length += new
        recording = self._recording
        assert recording is not None
        logits = logits.view(entries, new, -1).to(recording.dtype)
        keep = given.get("logits_to_keep") or 0
        from transformers.modeling_outputs import CausalLMOutputWithPast

        kept: Any = logits[:, -keep:] if keep else logits
        return CausalLMOutputWithPast(logits=kept, past_key_values=cache)

    def _is_a_step(self, cache: DecoderCache, ids: Tensor, given: dict[str, Any]) -> bool:
        if any(given.get(name) or getattr(self.model.config, name, False) for name in _MORE):
            return False
        if given.get("use_cache") is False or given.get("return_dict") is False:
            return False
        others = given.keys() - _TAKEN - _IGNORED - set(_MORE)
        return (
            not torch.is_grad_enabled()
            and all(given[name] is None for name in others)
            and isinstance(given.get("logits_to_keep") or 0, int)
            and ids.dim() == 2
            and ids.device.type == "cpu"
            and ids.dtype == torch.int64
            and ids.shape[0] == cache.rows
            and 0 < ids.numel() <= max(_FEW_TOKENS, ids.shape[0])
        )

    # --- proof

    def _prove(self) -> None:
        """Compare with the model itself, on tokens of no meaning; `NotRecorded` if it differs."""
        recording = self._recording
        assert recording is not None
        vocabulary = self.model.config.get_text_config(decoder=True).vocab_size
        chosen = torch.Generator().manual_seed(5)
        tokens = torch.randint(vocabulary, (1, _PROMPT + _STEPS), generator=chosen)
        # in the model's dtype: where an almost equal number is rounded to another, both are right
        store = recording.store()
        cache = DecoderCache(store)
        self._compare(cache, tokens)
        window = recording.window
        if window is not None and window < _LONGEST_WINDOW:
            # past the window, where what it hides would be seen
            cache.reserve(1, window + _PROMPT)
            store.values.normal_(generator=chosen)
            cache.length = window + 2
            self._compare(cache, tokens[:, : 1 + _STEPS])

    def _compare(self, cache: DecoderCache, tokens: Tensor) -> None:
        forward = _plain_forward(self.model)
        first = tokens.shape[1] - _STEPS
        was_training = self.model.training
        self.model.eval()
        with torch.no_grad():
            forward(input_ids=tokens[:, :first], past_key_values=cache, use_cache=True)
            begin = cache.length
            theirs = [
                forward(input_ids=tokens[:, i : i + 1], past_key_values=cache).logits[0, -1]
                for i in range(first, first + _STEPS)
            ]
            slots = torch.arange(begin, begin + _STEPS)
            rows, steps = torch.zeros_like(slots), tokens[0, first:]
            one = [
                self.step(cache.store, steps[i : i + 1], rows[:1], slots[i : i + 1])[0]
                for i in range(_STEPS)
            ]
            together = self.step(cache.store, steps, rows, slots)
        self.model.train(was_training)
        recording = self._recording
        assert recording is not None
        truth = torch.stack(theirs).float()
        for found in (torch.stack(one), together):
            off = error(found, truth)
            if not off <= _ALLOWED[recording.rounds_to]:
                raise NotRecorded(f"its logits and those of the tape differ by {off:.2g}")


def decoder(model: Any, *, dtype: torch.dtype | None = None, fills_in: bool = False) -> Decoder:
    """Generate with a model of transformers as fast as its weights can be read.

    The step of one token is recorded once, as a list of kernels and where their numbers are, and
    replayed by one call. What the model computes is found out by asking its layers; the recording
    is compared with the model itself before it is used. Where a model is not understood, or a call
    asks for more than logits, transformers computes it as ever.

    Args:
        model: a causal language model of transformers, dense or quantized, on a CPU.
        dtype: in which keys and values are kept: None for that of the model, torch.float16 or
            torch.bfloat16 for half the memory, torch.int8 for a quarter: a scale for each token
            and head, as `QuantizedCache` has it.
        fills_in: inside the block, `generate` gets a cache of the decoder where none is given.

    Returns:
        A `Decoder`. As a context manager it takes the steps of `model.generate` over until it is
        left; `cache()` makes what `generate` is to be given, `rows()` steps sequences of your own.

    Example:
        >>> with metalcore.decoder(model) as d:
        ...     model.generate(tokens, past_key_values=d.cache(), max_new_tokens=20)
    """
    allowed = (None, torch.float32, torch.float16, torch.bfloat16, torch.int8)
    names = "float32, float16, bfloat16 or int8"
    expect(dtype in allowed, "decoder", f"dtype must be {names}, got {dtype}")
    return Decoder(model, dtype, fills_in)


def _plain_forward(model: Any) -> Any:
    """The model's own forward, past the hook."""
    if isinstance(model, Decoding):
        return functools.partial(model.origin.base.forward, model)
    return model.forward


def _starts(cache: DecoderCache, ids: Tensor, given: dict[str, Any]) -> Tensor | None:
    """The first slot of each row that counts, None where rows are not padded on the left alone, or
    stand at other positions than their tokens."""
    entries, new = ids.shape
    end = cache.length + new
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    starts = torch.zeros(entries, dtype=torch.int64)
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.shape != (entries, end):
            return None
        if not bool(mask.all()):
            starts = end - mask.count_nonzero(-1)
            if bool((starts > cache.length).any()):
                return None
            if not torch.equal(torch.arange(end) >= starts[:, None], mask.bool()):
                return None
    expected = torch.arange(cache.length, end) - starts[:, None]
    if positions is None:
        # without positions, transformers counts what is padded
        return None if mask is not None and bool(starts.any()) else starts
    if positions.shape[-1] != new or positions.dim() != 2:
        return None
    return starts if bool((positions == expected).all()) else None


def _signature(model: Any) -> Any:
    """Equal as long as the model has the same layers and nobody wrote to a weight."""
    layers = [(id(m), type(m)) for m in model.modules() if m is not model]
    tensors = [*model.parameters(), *model.buffers()]
    weights = [(t.data_ptr(), 0 if t.is_inference() else t._version, t.dtype) for t in tensors]
    return layers, weights
