"""Images given to `LLM` in every form are the same prompt, and so are those of chats."""

from __future__ import annotations

import asyncio
import base64
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from jpaged import AsyncLLM
from jpaged.errors import InvalidArgument
from jpaged.types import SamplingParams
from tests.e2e.rig import open_llm
from tests.models.vision import pictures, write_vision_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ '[IMG]' if p.type == 'image' else p.text }}{% endfor %}{% endif %}{% endfor %}"
)
OPTIONS: dict[str, Any] = {"num_blocks": 96, "block_size": 4, "max_model_len": 80, "chat_template": TEMPLATE}


def turn(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


@pytest.mark.long
def test_every_form_of_an_image_gives_the_same_tokens(tmp_path: Path) -> None:
    write_vision_checkpoint("mistral3", tmp_path / "model")
    first, second = pictures((20, 32), (31, 9))
    written = io.BytesIO()
    Image.fromarray(first).save(written, "PNG")
    (tmp_path / "a.png").write_bytes(written.getvalue())
    uri = "data:image/png;base64," + base64.b64encode(written.getvalue()).decode()
    with open_llm(tmp_path / "model", **OPTIONS, allowed_local_media_path=str(tmp_path)) as llm:
        forms = (first, Image.fromarray(first), written.getvalue(), [first], first[None])
        prompts: list[Any] = [{"prompt": "20,[IMG]40,", "multi_modal_data": {"image": one}} for one in forms]
        prompts.append({"prompt_token_ids": [20, 10, 40], "multi_modal_data": {"image": first}})
        prompts.append({"prompt": "20,[IMG]40,", "multi_modal_data": {"image": second}})
        *same, other = [one.outputs[0].token_ids for one in llm.generate(prompts, GREEDY)]
        assert len(set(same)) == 1
        assert other != same[0]
        parts: list[Any] = [
            {"type": "image_url", "image_url": {"url": uri}},
            {"type": "image_url", "image_url": f"file://{tmp_path}/a.png"},
            {"type": "image_pil", "image_pil": Image.fromarray(first)},
            {"type": "image", "image": first},
        ]
        chats: Any = [turn("20,", part, {"type": "text", "text": "40,"}) for part in parts]
        outputs = llm.chat(chats, GREEDY)
        assert {one.outputs[0].token_ids for one in outputs} == {same[0]}
        assert all(one.usage.image_tokens == one.usage.prompt_tokens - 2 > 0 for one in outputs)
        assert llm.model_config.is_multimodal_model
        with pytest.raises(InvalidArgument, match=r"multi_modal_data\.image: 0 placeholders"):
            llm.generate({"prompt": "20,", "multi_modal_data": {"image": first}}, GREEDY)
        with pytest.raises(InvalidArgument, match=r"multi_modal_data\.video: is not supported: only image is"):
            llm.generate({"prompt": "20,", "multi_modal_data": {"video": first}}, GREEDY)

    async def stream() -> tuple[int, ...]:
        model = AsyncLLM(str(tmp_path / "model"), dtype="float32", **OPTIONS)
        try:
            prompt: Any = {"prompt": "20,[IMG]40,", "multi_modal_data": {"image": first}}
            async for output in model.generate(prompt, GREEDY, "a"):
                last = output
            return last.outputs[0].token_ids
        finally:
            model.close()

    assert asyncio.run(stream()) == same[0]
