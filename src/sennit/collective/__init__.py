"""Collective algorithms: language, compiler, verifier, library, synthesis, simulation, exports."""
