"""Preble (Srivatsa et al.): its figures, and its later parts where they act."""
