import sys

from fedjax_sim.cli.main import main

sys.exit(main())
