"""LoRA adapters, as models use them.

places.py   the matrices that may have adapters, and the layout of an adapter next to each
"""

from jpaged.models.lora.places import AdaptedPlace, HostAdapter, adapted_places, is_of_experts

__all__ = ["AdaptedPlace", "HostAdapter", "adapted_places", "is_of_experts"]
