"""Adapters (LoRA), as models see them.

places.py   which matrices may have adapters, and how these lie beside each of them
"""

from jpaged.models.lora.places import AdaptedPlace, HostAdapter, adapted_places, is_of_experts

__all__ = ["AdaptedPlace", "HostAdapter", "adapted_places", "is_of_experts"]
