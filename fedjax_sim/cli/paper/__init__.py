"""`fedjax-sim paper`: tables (data) → cells (which runs) → work (running what is left) → show
(pivot, files, figures)."""
