"""The texts of tokens, which log-probabilities speak of: looked up once each."""

from __future__ import annotations

from jpaged.service.loaded_model import LoadedModel


class TokenTexts:
    """The texts of a model's tokens, those that were asked for; as many as its vocabulary has at most."""

    def __init__(self) -> None:
        self._model: LoadedModel | None = None
        self._texts: dict[int, str] = {}

    def of(self, model: LoadedModel, token_id: int) -> str:
        """Return the text of one token by itself."""
        if model is not self._model:
            self._model, self._texts = model, {}
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = model.tokenizer.decode([token_id], skip_special_tokens=False)
        return text
