"""Serving in simulated time: the real engine above an executor that computes nothing but how long a step would take."""
