"""Variables that a chat template uses, found in its syntax tree without running it. Used only by the child."""

from __future__ import annotations

from typing import Any


def names(template: str) -> list[str]:
    """Return the variables that a template may look up before it sets them, sorted.

    Raises:
        TemplateSyntaxError: it is not a template, or has tags that transformers' environment lacks.
    """
    from jinja2 import Environment, meta
    from jinja2.ext import Extension

    class Generation(Extension):
        """Parses `{% generation %}`, which transformers adds to jinja, as its content."""

        tags = {"generation"}  # noqa: RUF012 - as jinja declares it

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = Environment(extensions=[Generation, "jinja2.ext.loopcontrols"])
    return sorted(meta.find_undeclared_variables(environment.parse(template)))
