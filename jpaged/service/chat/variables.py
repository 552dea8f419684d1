"""Which variables a chat template uses, read from its syntax tree without running it. For the child alone."""

from __future__ import annotations

from typing import Any


def names(template: str) -> list[str]:
    """The variables that a template may look up before it has set them, in order.

    Raises:
        TemplateSyntaxError: it is no template, or has tags that transformers' environment has not.
    """
    from jinja2 import Environment, meta
    from jinja2.ext import Extension

    class Generation(Extension):
        """Reads `{% generation %}`, which transformers adds to jinja, for what is in it."""

        tags = {"generation"}  # noqa: RUF012 - as jinja declares it

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = Environment(extensions=[Generation, "jinja2.ext.loopcontrols"])
    return sorted(meta.find_undeclared_variables(environment.parse(template)))
