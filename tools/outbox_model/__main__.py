from .world import main

raise SystemExit(main())
