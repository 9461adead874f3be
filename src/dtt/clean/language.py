"""Documents in other languages, as py3langid identifies them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtt.base.errors import ConfigError, EnvironmentUnfit
from dtt.clean.filters import Removal
from dtt.config.clean import LanguageConfig
from dtt.mesh.environment import install

SAMPLE = 4096
"""Characters at the start of a document that decide. py3langid loops in Python over each byte, so
a whole novel would take a tenth of a second and gain nothing."""


class LanguageFilter:
    """A filter that keeps documents in some languages.

    py3langid is naive Bayes over byte n-grams, with 139 languages and its model in the wheel.
    lingua's wheel has 96 MB, fastText's model is a download.
    """

    columns: tuple[str, ...] = ()

    def __init__(self, config: LanguageConfig) -> None:
        """Load the model.

        Raises EnvironmentUnfit if py3langid is not installed, and ConfigError for a code that it
        does not know.
        """
        try:
            from py3langid.langid import MODEL_FILE, LanguageIdentifier
        except ModuleNotFoundError as error:
            raise EnvironmentUnfit(
                "clean.language requires py3langid", why=str(error), next=install("language")
            ) from None
        identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
        if unknown := sorted({*config.keep} - {*identifier.labels}):
            raise ConfigError(
                f"clean.language.keep: py3langid has no language {', '.join(unknown)}",
                next=f"ISO 639-1 codes: {', '.join(sorted(identifier.labels))}",
            )
        self._classify = identifier.classify
        self._config = config

    def __call__(self, text: str, row: Mapping[str, Any]) -> Removal | None:
        """Return the language of a document that is removed, with its probability.

        One in a kept language is removed if the probability is below `min_confidence`; so is one
        without any features, such as an empty one, since all languages are equally probable.
        """
        language, probability = self.identify(text)
        if language in self._config.keep and probability >= self._config.min_confidence:
            return None
        return Removal("language", language, probability)

    def identify(self, text: str) -> tuple[str, float]:
        """Return the language of a text, with its probability."""
        language, probability = self._classify(text[:SAMPLE])
        return language, float(probability)
