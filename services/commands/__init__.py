"""The commands of ``farsight`` other than serve and batch, one file each."""
