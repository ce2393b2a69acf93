"""The Python interface, on the built-in model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import hotcold
from hotcold import LLM
from hotcold.engine.engine import Engine
from hotcold.engine.generation import Piece
from hotcold.errors import UserError
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions, PrivateOptions
from hotcold.tasks.scoring import Scorer, log_softmax

PROMPT = "Once upon a time"


def text_of(pieces: Iterable[Piece]) -> str:
    return "".join(map(str, pieces))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(sequences=3) as llm:
        yield llm


def test_a_stream_is_the_generated_text(llm: LLM) -> None:
    pieces = list(llm.stream(PROMPT, max_tokens=40, seed=5))
    generation = llm.generate(PROMPT, max_tokens=40, seed=5)
    assert len(pieces) > 20 and text_of(pieces) == generation.text == str(generation)
    assert generation.text == llm.tokenizer.decode(
        [*llm.tokenizer.encode(PROMPT), *generation.ids]
    ).removeprefix(PROMPT)
    assert (generation.prompt_tokens, generation.seed) == (5, 5)
    assert generation.finish_reason == "length" and len(generation.ids) == 40
    assert generation.timings.ttft_s is not None


def test_a_continuation_keeps_its_first_space(llm: LLM) -> None:
    assert llm.generate("Once upon", max_tokens=2, temperature=0).text == " a time"


def test_each_of_several_prompts_gets_what_it_gets_alone(llm: LLM) -> None:
    prompts = [PROMPT, "The king", "", "Peter and Heidi went up the mountain, and there they found", "I"]
    together = llm.generate(prompts, max_tokens=30, seed=3)
    alone = [
        llm.generate(prompt, max_tokens=30, seed=g.seed) for prompt, g in zip(prompts, together, strict=True)
    ]
    assert [(g.text, g.ids) for g in together] == [(g.text, g.ids) for g in alone]
    assert llm.generate([], max_tokens=3) == []


def test_several_prompts_draw_different_numbers(llm: LLM) -> None:
    together = llm.generate([PROMPT] * 4, max_tokens=20, seed=3)
    seeds = [each.seed for each in together]
    assert seeds[0] == 3 and len(set(seeds)) == 4 and all(0 <= seed < 1 << 63 for seed in seeds)
    assert len({each.ids for each in together}) == 4
    assert [each.seed for each in llm.generate(["I"] * 4, max_tokens=1, seed=3)] == seeds
    assert len({each.seed for each in llm.generate(["I"] * 4, max_tokens=1)}) == 4


def test_ten_runs_with_one_seed_are_one_text_and_other_seeds_are_others(llm: LLM) -> None:
    assert len({llm.generate(PROMPT, max_tokens=25, seed=11).ids for _ in range(10)}) == 1
    assert len({llm.generate(PROMPT, max_tokens=25, seed=seed).ids for seed in range(10)}) == 10


def test_a_drawn_seed_gives_the_text_again(llm: LLM) -> None:
    first = llm.generate(PROMPT, max_tokens=30)
    assert llm.generate(PROMPT, max_tokens=30, seed=first.seed).ids == first.ids


def test_token_ids_are_taken_as_they_are(llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPT)
    expected = llm.generate(PROMPT, max_tokens=8, temperature=0)
    assert text_of(llm.stream(ids, max_tokens=8, temperature=0)) == expected.text
    forms: list[Any] = [
        ids,
        tuple(ids),
        np.array(ids),
        np.array(ids, np.uint16),
        [np.int32(id) for id in ids],
    ]
    for form in forms:
        assert llm.generate(form, max_tokens=8, temperature=0).ids == expected.ids
    several = llm.generate([*forms, PROMPT], max_tokens=8, temperature=0)
    assert [each.ids for each in several] == [expected.ids] * 6
    short = llm.generate([[5], [6, 7]], max_tokens=1)
    assert [each.prompt_tokens for each in short] == [1, 2]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (3, "a prompt has the type int: a text, token ids, or a list of these is needed"),
        (b"Once", "a prompt has the type bytes"),
        ({1, 2}, "a prompt has the type set"),
        ([1.5, 2], "the prompt is an array of float64: a flat array of integer token ids is needed"),
        ([True], "the prompt is an array of bool"),
        (np.ones(3), "the prompt is an array of float64"),
        (np.ones((2, 2), int), "the prompt is an array of int64 with 2 dimensions"),
        ([2**70], "the prompt is an array of object"),
        ([1, [2]], "the prompt is an array of object: a flat array"),
        ([1, "a"], "the prompt is an array of <U21: a flat array"),
        ([1, 4096], "the prompt has token 4096: allowed are the ids 0 to 4095"),
        ([-1], "the prompt has token -1"),
        (np.array([], int), "the prompt has no tokens"),
        (["a", 3], "a prompt has the type int: a text, token ids, or a list of these is needed"),
        ([["a"], "b"], "a list of prompts holds a list of texts: each prompt is a text or a flat"),
        ([None], "a prompt has the type NoneType"),
        ("\ud800", "a lone surrogate"),
    ],
)
def test_what_is_no_prompt(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        llm.generate(prompt)
    assert not llm.engine.scheduler.unfinished


def test_an_abandoned_stream_gives_its_pages_back(llm: LLM) -> None:
    free = llm.session.cache.free_pages
    stream = llm.stream(PROMPT, max_tokens=100)
    next(stream)
    assert llm.session.cache.free_pages < free
    stream.close()  # what leaving a for loop does as soon as nothing refers to the generator
    assert llm.session.cache.free_pages == free
    del stream
    never_started = llm.stream(PROMPT)
    del never_started
    assert llm.session.cache.free_pages == free and not llm.engine.scheduler.waiting


def test_two_streams_at_once(llm: LLM) -> None:
    expected = llm.generate(PROMPT, max_tokens=20, seed=1).text
    first, second = (llm.stream(PROMPT, max_tokens=20, seed=1) for _ in range(2))
    texts = ["", ""]
    for piece in first:
        texts[0] += str(piece)
        texts[1] += str(next(second, ""))
    texts[1] += text_of(second)
    assert texts == [expected, expected]


def test_the_end_of_the_context(llm: LLM) -> None:
    generation = llm.generate(PROMPT, max_tokens=1000, ignore_eos=True, seed=1)
    assert (generation.finish_reason, generation.context_full) == ("length", True)
    assert generation.prompt_tokens + len(generation.ids) == 256


def test_a_prompt_that_is_too_long_is_refused_before_the_first_piece(llm: LLM) -> None:
    with pytest.raises(ValueError, match="the prompt has 301 tokens and the context holds 256"):
        llm.stream([5] * 301)
    with pytest.raises(ValueError, match="the prompt has 301 tokens and the context holds 256"):
        llm.generate([5] * 301)
    assert not llm.engine.scheduler.waiting and not llm.engine.scheduler.running


def test_wrong_options_are_refused(llm: LLM) -> None:
    with pytest.raises(
        TypeError, match=r"unknown option 'temprature': allowed are max_tokens, .*temperature"
    ):
        llm.generate(PROMPT, temprature=0.5)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="temperature is -1"):
        llm.generate(PROMPT, temperature=-1)
    with pytest.raises(ValueError, match="max_tokens is 0"):
        llm.generate(PROMPT, max_tokens=0)
    with pytest.raises(ValueError, match="logprobs is 21: allowed are the whole numbers 0 to 20"):
        llm.generate(PROMPT, logprobs=21)
    with pytest.raises(ValueError, match="stop holds a string of 0"):
        llm.stream(PROMPT, stop=["a", ""])
    public = r"^unknown option 'thread': allowed are sparsity, .*, draft$"
    with pytest.raises(TypeError, match=public) as caught:
        LLM(thread=3)  # type: ignore[call-arg]
    assert not any(name in str(caught.value) for name in PrivateOptions.__annotations__)
    with pytest.raises(ValueError, match=r"threads is 1\.5: a whole number is needed"):
        LLM(threads=1.5)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="threads is an option of loading, and the model is loaded already"):
        LLM(llm.model, threads=1)


def test_a_closed_llm_says_so() -> None:
    llm = LLM(backend="reference", context=32)
    assert llm.model.context == 32
    llm.close()
    with pytest.raises(ValueError, match="this LLM is closed"):
        llm.generate(PROMPT)


def test_a_text_that_fails_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes after the text before it, and others' texts are as they are."""
    with LLM(sequences=2) as llm:
        expected = llm.generate(PROMPT, max_tokens=12, seed=1).text
        inner = llm.engine.sampler.sample

        def sample(logits: Any, row: int, params: Any, position: int, recent: Any = ()) -> int:
            if params.seed == 13 and position == 9:
                head = llm.engine.session.transformer.head
                head.write(logits, np.full_like(head.read(logits, row, row + 1), np.nan), row)
            return inner(logits, row, params, position, recent)

        monkeypatch.setattr(llm.engine.sampler, "sample", sample)
        pieces = []
        other = llm.stream(PROMPT, max_tokens=12, seed=1)
        others = [next(other)]
        with pytest.raises(ValueError, match="logits contain nan"):
            for piece in llm.stream(PROMPT, max_tokens=12, seed=13):
                pieces.append(piece)
        assert len(pieces) == 4
        assert text_of([*others, *other]) == expected
        with pytest.raises(ValueError, match="logits contain nan"):
            llm.generate(PROMPT, seed=13)
        failed, king = llm.generate([PROMPT, "The king"], seed=13, max_tokens=12)
        assert failed.finish_reason == "error" and "logits contain nan" in str(failed.error)
        assert failed.text == text_of(pieces) and len(failed.ids) == 4
        assert king.error is None and king == replace(
            llm.generate("The king", seed=king.seed, max_tokens=12), timings=king.timings
        )
        assert llm.session.cache.free_pages == llm.session.cache.pages
        assert llm.generate(PROMPT, max_tokens=12, seed=1).text == expected


def test_two_users_of_one_model() -> None:
    """The second is refused while the first is not done; another session of the same weights is not."""
    with LLM() as llm:
        expected = llm.generate(PROMPT, max_tokens=12, temperature=0).ids
        window = llm.tokenizer.encode(PROMPT)
        request = llm.request(PROMPT, max_tokens=12, temperature=0)
        llm.engine.add(request)
        for _ in range(4):
            llm.engine.step()
        other = Engine(llm.session)
        refused = r"in use by an engine with 1 unfinished requests: finish or abort .* model.session\(\)"
        with pytest.raises(UserError, match=refused):
            other.add(llm.request(PROMPT))
        with pytest.raises(UserError, match=refused):
            next(Scorer(llm.session).logits(window))
        apart = Engine(llm.model.session("off"))
        apart.run([twin := llm.request(PROMPT, max_tokens=12, temperature=0)])
        while not request.finished:
            llm.engine.step()
        assert tuple(request.output) == tuple(twin.output) == expected
        other.run([again := llm.request(PROMPT, max_tokens=12, temperature=0)])
        assert tuple(again.output) == expected

        rows = Scorer(llm.session).logits(window)
        next(rows)
        for busy in (lambda: llm.generate(PROMPT), lambda: next(Scorer(llm.session).logits(window))):
            with pytest.raises(UserError, match="in use by a scoring that has not come to the end"):
                busy()
        rows.close()
        assert llm.generate(PROMPT, max_tokens=12, temperature=0).ids == expected
        llm.engine.add(llm.request(PROMPT))
        llm.engine.step()
        del other  # an engine that is gone owns nothing
        forgotten = Engine(llm.session)
        with pytest.raises(UserError):
            forgotten.add(llm.request(PROMPT))
        llm._engine = forgotten
        assert llm.generate(PROMPT, max_tokens=12, temperature=0).ids == expected
        assert llm.session.cache.free_pages == llm.session.cache.pages


def test_a_prompt_that_cannot_run_does_not_lose_the_others(llm: LLM) -> None:
    prompts: list[Any] = [PROMPT, "goat " * 400, "\ud800", [], [9999], PROMPT]
    done = llm.generate(prompts, max_tokens=9, seed=2)
    assert [each.finish_reason for each in done] == ["length", *["error"] * 4, "length"]
    messages = ["context holds 256", "lone surrogate", "has no tokens", "has token 9999"]
    assert all(words in str(each.error) for words, each in zip(messages, done[1:5], strict=True))
    assert [each.prompt_tokens for each in done] == [5, 0, 0, 0, 0, 5]
    assert all(each.text == "" and each.ids == () for each in done[1:5])
    assert done[0].ids == llm.generate(PROMPT, max_tokens=9, seed=2).ids
    assert done[5].ids == llm.generate(PROMPT, max_tokens=9, seed=done[5].seed).ids != done[0].ids
    drawn = llm.generate([PROMPT, []], max_tokens=1)
    assert [each.finish_reason for each in drawn] == ["length", "error"]
    assert len({each.seed for each in drawn}) == 2


def test_pieces_say_all_that_is_new(llm: LLM) -> None:
    pieces = list(llm.stream(PROMPT, max_tokens=30, seed=4, logprobs=2))
    whole = llm.generate(PROMPT, max_tokens=30, seed=4, logprobs=2)
    assert tuple(id for piece in pieces for id in piece.ids) == whole.ids
    assert tuple(each for piece in pieces for each in piece.logprobs) == whole.logprobs
    assert {piece.finish_reason for piece in pieces[:-1]} == {None} and all(map(str, pieces[:-1]))
    last = pieces[-1]
    assert (last.finish_reason, last.seed, last.prompt_tokens) == ("length", 4, 5)
    moments = last.timings.added, last.timings.first_token, last.timings.finished
    assert None not in moments and sorted(moments) == list(moments)  # type: ignore[type-var]
    assert pieces[0].timings.finished is None, "those of its moment, not of the end"


def test_a_drawn_seed_is_told_with_the_first_piece(llm: LLM) -> None:
    first, *rest = llm.stream(PROMPT, max_tokens=20)
    text = text_of([first, *rest])
    assert llm.generate(PROMPT, max_tokens=20, seed=first.seed).text == text


def test_stop_strings_end_the_text(llm: LLM) -> None:
    """Every short part of a text is tried: one that a token cuts, that begins in one and ends in another."""
    whole = llm.generate(PROMPT, max_tokens=25, temperature=0)
    lengths = [len(llm.generate(PROMPT, max_tokens=n, temperature=0).text) for n in range(1, 26)]
    stops = sorted({whole.text[at : at + n] for at in range(0, len(whole.text), 5) for n in (1, 4, 9)})
    for stop in stops:
        end = whole.text.index(stop)
        found = llm.generate(PROMPT, max_tokens=25, temperature=0, stop=stop)
        assert (found.text, found.stop, found.finish_reason) == (whole.text[:end], stop, "stop")
        # The last token is the one with which the stop string was complete.
        assert len(found.ids) == 1 + next(n for n in range(25) if lengths[n] >= end + len(stop))
        assert found.ids == whole.ids[: len(found.ids)]
        *_, last = pieces = list(llm.stream(PROMPT, max_tokens=25, temperature=0, stop=[stop, "xyz"]))
        assert text_of(pieces) == found.text and (last.stop, last.finish_reason) == (stop, "stop")
    assert llm.session.cache.free_pages == llm.session.cache.pages
    unmet = llm.generate(PROMPT, max_tokens=25, temperature=0, stop=["xyz", whole.text + "!"])
    assert (unmet.text, unmet.ids, unmet.stop) == (whole.text, whole.ids, None)
    assert unmet.finish_reason == "length"


def test_a_stop_string_in_a_stream_that_others_drive(llm: LLM) -> None:
    """Tokens that came after it while another stream was read do not count."""
    whole = llm.generate(PROMPT, max_tokens=30, temperature=0)
    stop = whole.text[20:24]
    expected = llm.generate(PROMPT, max_tokens=30, temperature=0, stop=stop)
    slow = llm.stream(PROMPT, max_tokens=30, temperature=0, stop=stop)
    pieces = [next(slow)]
    assert text_of(llm.stream(PROMPT, max_tokens=30, temperature=0)) == whole.text
    pieces += slow
    assert text_of(pieces) == expected.text and pieces[-1].finish_reason == "stop"
    assert tuple(id for piece in pieces for id in piece.ids) == expected.ids


def test_logprobs_are_those_of_the_model(llm: LLM) -> None:
    found = llm.generate(PROMPT, max_tokens=12, seed=6, temperature=1.5, logprobs=3)
    ids = [*llm.tokenizer.encode(PROMPT), *found.ids]
    with LLM(llm.model) as other:
        rows = np.concatenate([log_softmax(each) for each in Scorer(other.session).logits(ids)])[-12:]
    for id, (logprob, top), row in zip(found.ids, found.logprobs, rows, strict=True):
        assert logprob == pytest.approx(row[id], abs=1e-3)
        assert [each for each, _ in top] == np.argsort(-row, kind="stable")[:3].tolist()
        np.testing.assert_allclose([value for _, value in top], np.sort(row)[::-1][:3], atol=1e-3)
    assert llm.generate(PROMPT, max_tokens=3).logprobs == ()
    assert all(each.top == () for each in llm.generate(PROMPT, max_tokens=3, logprobs=0).logprobs)


def test_sampling_options_reach_the_sampler(llm: LLM) -> None:
    greedy = llm.generate(PROMPT, max_tokens=12, temperature=0).ids
    biased = llm.generate(PROMPT, max_tokens=12, temperature=0, logit_bias={greedy[0]: -np.inf}).ids
    assert greedy[0] not in biased
    penalised = llm.generate(PROMPT, max_tokens=40, temperature=0, repeat_penalty=3).ids
    all_of_it = llm.generate(PROMPT, max_tokens=40, temperature=0, repeat_penalty=3, repeat_last_n=-1).ids
    assert penalised == all_of_it, "45 tokens are fewer than 64"
    few = llm.generate(PROMPT, max_tokens=40, temperature=0, repeat_penalty=3, repeat_last_n=8).ids
    none = llm.generate(PROMPT, max_tokens=40, temperature=0, repeat_penalty=3, repeat_last_n=0).ids
    assert none == llm.generate(PROMPT, max_tokens=40, temperature=0).ids
    assert len({penalised, few, none}) == 3


def test_numbers_of_numpy() -> None:
    with LLM(threads=np.int64(1), context=np.int32(64), sequences=np.uint8(2)) as llm:  # type: ignore[arg-type]
        assert (llm.model.threads, llm.model.context) == (1, 64)
        plain = llm.generate(PROMPT, max_tokens=9, temperature=0.5, top_k=7, seed=5, logit_bias={7: 1.5})
        same: dict[str, Any] = {
            "max_tokens": np.int16(9),
            "temperature": np.float32(0.5),
            "top_k": np.int64(7),
            "seed": np.uint64(5),
            "logit_bias": {np.int32(7): np.float64(1.5)},
        }
        for form in (same, same | {"logit_bias": {np.int64(7): np.float32(1.5)}}):
            found = llm.generate(PROMPT, **form)
            assert found.ids == plain.ids and type(found.seed) is int
        ((_, logprobs),) = enumerate(llm.generate(PROMPT, max_tokens=1, logprobs=np.int8(2)).logprobs)
        assert len(logprobs.top) == 2


def test_two_llms_share_weights() -> None:
    model = load(None, LoadOptions(context=64))
    with LLM(model) as one:
        expected = one.generate(PROMPT, max_tokens=9, temperature=0)
        with LLM(model) as two:
            stream = one.stream(PROMPT, max_tokens=9, temperature=0)
            pieces = [next(stream)]
            assert two.generate(PROMPT, max_tokens=9, temperature=0).text == expected.text
            assert two.model is one.model is model
        assert text_of([*pieces, *stream]) == expected.text, "closing one leaves the other"


def test_loading_tells_what_it_is_at() -> None:
    reports: list[tuple[str, int, int]] = []
    with LLM(progress=lambda *state: reports.append(state)):
        pass
    assert {phase for phase, _, _ in reports} == {"loading"}
    assert reports[-1][1] == reports[-1][2] > 7e6


def test_public_errors_and_what_an_llm_is(llm: LLM) -> None:
    """A program needs no name beside those of the package."""
    context = llm.model.context
    threads = llm.model.threads
    assert repr(llm) == f"LLM('fable-7m-q8_0', sparsity='exact', context={context}, threads={threads})"
    with LLM(llm.model) as other:
        pass
    assert repr(other) == "LLM(closed)"
    with pytest.raises(hotcold.MissingFileError) as missing:
        LLM("no-such.gguf")
    assert isinstance(missing.value, hotcold.UserError) and isinstance(missing.value, FileNotFoundError)
    with pytest.raises(hotcold.PromptTooLongError) as long:
        llm.generate([5] * context)
    assert (long.value.tokens, long.value.context) == (context, context)
    assert isinstance(long.value, hotcold.UserError)
    with pytest.raises(hotcold.MessageError, match=r"messages\[0\]\.role is 'robot'") as bad:
        llm.chat([{"role": "robot", "content": "Hello"}])
    assert isinstance(bad.value, hotcold.UserError)
    pieces = list(llm.stream(PROMPT, max_tokens=3, seed=1))
    assert "".join(map(str, pieces)) == "".join(piece.text for piece in pieces)
